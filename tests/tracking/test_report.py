"""The report: opens with the network off, worst first, and shows no name as markup."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import threading
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.tracking.changes import PAGE, Page, newest_pairs, render
from benchmarks.tracking.judging.verdict import Outcome, Report, Series, Verdict

from .conftest import Project

# Chromium refuses every name and address but loopback, as on a machine that is offline.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--virtual-time-budget=8000", "--window-size=1400,1000"),
)


def verdict(name: str, outcome: Outcome, slower: float, metric: str = "latency") -> Verdict:
    series = Series("box", "env", name)
    return Verdict(series, metric, "seconds", "sampled", outcome, "why", 1e-3, 2e-3, slower)


def page_of(*verdicts: Verdict) -> str:
    return render("p", [Page("box", "cpu x", Report("a" * 40, "b" * 40, verdicts))])


def test_worst_first_and_units_on_both_sides() -> None:
    html = page_of(
        verdict("mild", Outcome.REGRESSED, 0.05),
        verdict("better", Outcome.IMPROVED, -0.5),
        verdict("awful", Outcome.REGRESSED, 0.7),
    )
    assert html.index("awful") < html.index("mild") < html.index("better")
    assert "1 ms → 2 ms" in html


def test_names_from_results_are_text_never_markup() -> None:
    html = page_of(verdict("<script>alert(1)</script>", Outcome.REGRESSED, 0.1))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_page_asks_no_other_host_for_anything() -> None:
    html = page_of(verdict("x", Outcome.REGRESSED, 0.1))
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html)


def test_newest_two_commits_of_each_home_on_the_line() -> None:
    class Stub:
        def __init__(self, machine: str, commit: str):
            self.machine, self.env, self.commit = machine, "e", commit

    def pairs(**measured: str) -> list[tuple[str, str, str]]:
        runs = [
            Stub(machine, commit) for machine in measured for commit in measured[machine].split()
        ]
        return newest_pairs(runs, ["c1", "c2", "c3", "c4"])  # type: ignore[arg-type]

    assert pairs(m="c3 c1 c2 branch", n="c1") == [("m", "c2", "c3")]
    assert pairs(m="c1 c2", n="c4 c1") == [("n", "c1", "c4"), ("m", "c1", "c2")]


@pytest.fixture(scope="module")
def site(project: Project) -> Iterator[tuple[Path, str]]:
    """Two commits measured and published, served on loopback."""
    project.commit("second")
    project.asv("run")
    html = project.folder / ".asv/html"
    assert (html / PAGE).is_file(), "plain `asv run` leaves a report"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(html))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield html, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def browse(chromium: str, tmp_path: Path, url: str) -> tuple[str, Path]:
    """The page's DOM after its scripts ran, and a picture of it."""
    picture = tmp_path / "page.png"
    base = [chromium, *QUIET, OFFLINE]
    dom = subprocess.run(
        [*base, f"--user-data-dir={tmp_path / 'a'}", "--dump-dom", url],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    subprocess.run(
        [*base, f"--user-data-dir={tmp_path / 'b'}", f"--screenshot={picture}", url],
        capture_output=True,
        check=True,
    )
    return dom, picture


def test_graphs_open_in_a_browser_with_the_network_off(
    site: tuple[Path, str], chromium: str, tmp_path: Path
) -> None:
    dom, picture = browse(chromium, tmp_path, site[1])
    assert "toy.Toy.track_latency" in dom
    assert PAGE in dom, "our own page is linked"
    assert picture.stat().st_size > 20_000, "an empty or error page is far smaller"


def test_what_changed_opens_from_a_folder_too(
    site: tuple[Path, str], chromium: str, tmp_path: Path
) -> None:
    dom, picture = browse(chromium, tmp_path, (site[0] / PAGE).as_uri())
    assert "toy" in dom
    assert "cpu " in dom, "the machine is named with its hardware"
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("width", [400, 1280])
def test_what_changed_fits_a_phone_and_a_screen(width: int, chromium: str, tmp_path: Path) -> None:
    """No table is wider than its page, which would hide the change behind a scroll bar."""
    name = "latency.Inference.track_latency(qwen3_expert, prompt, fp32, fused)"
    page = escape(page_of(verdict(name, Outcome.REGRESSED, 0.1)))
    probe = tmp_path / "probe.html"
    probe.write_text(
        f"""<iframe width={width} srcdoc="{page}" onload="document.title = 'hidden: ' +
        [...contentDocument.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)">"""
    )
    dom, _ = browse(chromium, tmp_path, probe.as_uri())
    assert "<title>hidden: 0</title>" in dom


@pytest.mark.parametrize("port", ["80000", "-1", "http"])
def test_a_port_that_is_none_is_refused_before_anything_is_published(port: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["report", "--port", port])
    assert exit_.value.code == 2
    assert "is no port" in capsys.readouterr().err


def test_stock_assets_that_need_a_network_are_gone(site: tuple[Path, str]) -> None:
    index = (site[0] / "index.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", index)
    assets = re.findall(r'(?:src|href)="\./([^"]+)"', index)
    assert assets
    assert all((site[0] / name).is_file() for name in assets)
