"""The runner refuses what would measure something else, and its clocks are let go again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from .conftest import ROOT, load

RUNNER = ROOT / ".github" / "runner"

SMI = """#!/bin/sh
echo "$*" >> "$SMI_LOG"
case "$*" in
  *driver_version*) [ -z "$SMI_BROKEN" ] || exit 9; echo 570.10 ;;
  *utilization*) echo "${SMI_STATE:-0, 0, 4}" ;;
  *compute-apps*) [ -z "$SMI_APPS" ] || echo "$SMI_APPS" ;;
  *supported-clocks*) printf '2000\\n1750\\n1500\\n1490\\n1200\\n' ;;
  *lock-gpu-clocks*|*reset-gpu-clocks*)
    [ -z "$SMI_DENIED" ] || { echo "Insufficient Permissions"; exit 4; } ;;
esac
"""
PYTHON = """#!/bin/sh
case "$2" in *is_available*) exit "${TORCH_BLIND:-0}" ;; esac
exit "${NO_TORCH:-0}"
"""


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """A machine with a fake GPU tool and a clean checkout."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("nvidia-smi", SMI), ("python", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    work = tmp_path / "work"
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    (work / ".git" / "info").mkdir(exist_ok=True)
    (work / ".git" / "info" / "exclude").write_text(".asv/\n")
    return {
        "PATH": f"{tools}:/usr/bin:/bin",
        "PYTHON": str(tools / "python"),
        "SMI_LOG": str(tmp_path / "smi.log"),
        "WORK": str(work),
        "PREFLIGHT_FREE_GIB": "0",
        "FUSED_MLP_CLOCK_SOCKET": str(tmp_path / "no.sock"),
        "FUSED_MLP_CLOCK_FILE": str(tmp_path / "no-mhz"),
    }


def preflight(host: dict[str, str], **changes: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(RUNNER / "preflight.sh")],
        cwd=host["WORK"],
        env={**host, **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_idle_machine_is_ready(host: dict[str, str]) -> None:
    code, text = preflight(host)
    assert (code, "ready (cuda" in text) == (0, True), text
    os.remove(Path(host["PATH"].split(":")[0], "nvidia-smi"))
    assert preflight(host, FUSED_MLP_DEVICE="cpu")[0] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"SMI_BROKEN": "1"}, "finds no GPU"),
        ({"SMI_STATE": "0, 37, 4"}, "GPU 0 is 37 % busy"),
        ({"SMI_STATE": "0, 0, 4000"}, "4000 MiB in use"),
        ({"SMI_STATE": "0, [N/A], 4"}, "does not say"),
        ({"SMI_STATE": "0, 0, 4\n1, 99, 4"}, "GPU 1 is 99 % busy"),
        ({"SMI_APPS": "4242"}, "1 process(es) hold the GPU"),
        ({"TORCH_BLIND": "1"}, "torch does not see the GPU"),
        ({"NO_TORCH": "1"}, "has no torch"),
        ({"PREFLIGHT_FREE_GIB": "9999999"}, "GiB free"),
    ],
)
def test_a_machine_that_would_measure_something_else_is_refused(
    host: dict[str, str], changes: dict[str, str], reason: str
) -> None:
    code, text = preflight(host, **changes)
    assert (code, reason in text) == (2, True), text


def test_somebody_elses_files_are_refused_and_everything_is_said(host: dict[str, str]) -> None:
    (Path(host["WORK"]) / ".asv").mkdir()
    (Path(host["WORK"]) / ".asv" / "env").write_text("")
    code, text = preflight(host, SMI_APPS="1")
    assert code == 2
    assert "not clean" in text
    assert "hold the GPU" in text


def clocks(host: dict[str, str], word: str, tmp_path: Path, **changes: str) -> tuple[int, str]:
    output = tmp_path / "output"
    output.write_text("")
    done = subprocess.run(
        [sys.executable, str(RUNNER / "clocks.py"), word],
        env={**host, "GITHUB_OUTPUT": str(output), **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, output.read_text().strip()


def test_clocks_are_locked_at_a_rate_that_holds_and_released(
    host: dict[str, str], tmp_path: Path
) -> None:
    assert clocks(host, "lock", tmp_path) == (0, "state=locked 1500 MHz")
    assert clocks(host, "release", tmp_path) == (0, "state=unlocked")
    log = Path(host["SMI_LOG"]).read_text()
    assert "--lock-gpu-clocks=1500,1500" in log
    assert log.rstrip().endswith("--reset-gpu-clocks")
    chosen = tmp_path / "mhz"
    chosen.write_text("1410\n")
    locked = clocks(host, "lock", tmp_path, FUSED_MLP_CLOCK_FILE=str(chosen))
    assert locked == (0, "state=locked 1410 MHz")


def test_clocks_that_cannot_be_locked_are_recorded_as_unlocked(
    host: dict[str, str], tmp_path: Path
) -> None:
    assert clocks(host, "lock", tmp_path, SMI_DENIED="1") == (0, "state=unlocked")
    assert clocks(host, "lock", tmp_path, FUSED_MLP_DEVICE="cpu") == (0, "state=unlocked")
    assert clocks(host, "faster", tmp_path) == (2, "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("locked 1500 MHz", "locked 1500 MHz"), ("error: denied", "unlocked"), ("", "unlocked")],
)
def test_a_job_without_rights_asks_the_root_service(
    host: dict[str, str], tmp_path: Path, answer: str, expected: str
) -> None:
    path = tmp_path / "clocks.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        heard: list[str] = []

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                heard.append(connection.makefile().readline())
                connection.sendall(f"{answer}\n".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        found = clocks(host, "lock", tmp_path, FUSED_MLP_CLOCK_SOCKET=str(path))
        thread.join(10)
    assert found == (0, f"state={expected}")
    assert heard == ["lock\n"]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("lock\n", "locked 1500 MHz"),
        ("release\n", "unlocked"),
        ("lock; reboot\n", "error: lock or release"),
        ("x" * 10_000, "error: lock or release"),
        ("", "error: lock or release"),
    ],
)
def test_the_root_service_knows_two_words(host: dict[str, str], said: str, answer: str) -> None:
    command = [sys.executable, str(RUNNER / "clocks.py"), "serve"]
    done = subprocess.run(command, input=said, env=host, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == answer


def archive(path: Path) -> str:
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo("run.sh")
        entry.size, entry.mode = 3, 0o755
        tar.addfile(entry, io.BytesIO(b"hi\n"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def provision(tmp_path: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    runner, token = tmp_path / "runner.tar.gz", tmp_path / "token"
    digest = archive(runner)
    token.write_text("secret-token\n")
    options = {
        "organization": "fused-mlp",
        "group-id": "7",
        "runner": str(runner),
        "sha256": digest,
        "token": str(token),
        "clock-mhz": "1410",
        "prefix": str(tmp_path / "host"),
        **changes,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return subprocess.run(
        ["bash", str(RUNNER / "provision.sh"), *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_provisioning_lays_out_a_host_and_may_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        done = provision(tmp_path)
        assert done.returncode == 0, done.stderr
    host = tmp_path / "host"
    assert (host / "usr/local/lib/fused-mlp/actions-runner/run.sh").is_file()
    assert (host / "etc/fused-mlp/token").stat().st_mode & 0o777 == 0o600
    assert (host / "etc/fused-mlp/clock-mhz").read_text() == "1410\n"
    assert "RUNNER_GROUP_ID=7" in (host / "etc/fused-mlp/runner.env").read_text()
    units = {path.name for path in (host / "etc/systemd/system").iterdir()}
    assert units == {p.name for p in RUNNER.iterdir() if p.suffix in (".service", ".socket")}
    assert "secret-token" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sha256": "0" * 64}, "is not the file"),
        ({"sha256": "0"}, "64 hexadecimal digits"),
        ({"group-id": "1"}, "open to every workflow"),
        ({"group-id": "all"}, "number of the runner group"),
        ({"organization": "a/b"}, "organization's name"),
        ({"runner": "/nowhere"}, "no such file"),
        ({"token": "/dev/null"}, "no such file, or empty"),
        ({"clock-mhz": "fast"}, "rate in MHz"),
        ({"unknown": "1"}, "unknown option"),
    ],
)
def test_provisioning_refuses_what_it_cannot_vouch_for(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    done = provision(tmp_path, **changes)
    assert done.returncode == 2
    assert reason in done.stderr
    assert not (tmp_path / "host").exists()


def test_a_job_leaves_nothing_and_cleaning_touches_nothing_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "fused-mlp-job", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "cache").write_text("poison")
    (folder / "link").symlink_to(outside)
    (tmp_path / "by-link").mkdir()
    clean = ["sh", str(RUNNER / "clean.sh")]
    subprocess.run([*clean, str(folder)], check=True)
    assert list(folder.iterdir()) == []
    assert (outside / "kept").exists()
    done = subprocess.run([*clean, str(outside)], capture_output=True, check=False)
    assert done.returncode == 2
    assert (outside / "kept").exists()


def test_the_registration_is_for_one_group_and_one_job(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    asked: list[tuple[str, dict[str, object], str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(content), self.headers["Authorization"]))
            self.send_response(201)
            self.end_headers()
            self.wfile.write(b'{"encoded_jit_config": "once"}')

        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "token").write_text("secret-token\n")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        settings = {
            "ORGANIZATION": "fused-mlp",
            "RUNNER_GROUP_ID": "7",
            "CREDENTIALS_DIRECTORY": str(tmp_path),
            "GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}",
        }
        command = [sys.executable, str(RUNNER / "register.py"), str(tmp_path / "jit")]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        thread.join(10)
    path, body, authorization = asked[0]
    assert path == "/orgs/fused-mlp/actions/runners/generate-jitconfig"
    assert body["runner_group_id"] == 7
    assert authorization == "Bearer secret-token"
    assert (tmp_path / "jit").read_text() == "once"
    assert "secret" not in done.stdout + done.stderr


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    for unit in [*RUNNER.glob("*.service"), *RUNNER.glob("*.socket")]:
        # The programs are not installed here; systemd is only asked about the rest.
        text = unit.read_text().replace("=/usr/local/lib/fused-mlp/", "=/bin/true /x/")
        (tmp_path / unit.name).write_text(text.replace("=+/usr/local/lib/", "=+/bin/true /x/"))
    units = [str(path) for path in tmp_path.iterdir()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Unknown" not in done.stderr


def test_the_service_gives_each_job_nothing_of_the_one_before() -> None:
    unit = (RUNNER / "fused-mlp-runner.service").read_text()
    for line in (
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=strict",
        "KillMode=control-group",
        "Restart=always",
        "LoadCredential=token:",
        "ExecStopPost=+/usr/bin/python3 /usr/local/lib/fused-mlp/clocks.py release",
    ):
        assert f"\n{line}" in unit
    register = load(".github/runner/register.py")
    assert register.body("x", 7)["work_folder"] == "_work"
