"""Hold the GPU's clock at a rate it can keep, and let it go again.

usage: clocks.py lock | release       as the job: through the host's root service, else directly
       clocks.py serve                as that service: one word in, one line out

Measured code runs as a user without rights, so it cannot set clocks, and neither can the job. A
root service on a socket does, and knows two words. Where clocks cannot be locked the state is
"unlocked": results then say so, and are never compared with locked ones. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

SOCKET = Path(os.environ.get("FUSED_MLP_CLOCK_SOCKET", "/run/fused-mlp/clocks.sock"))
CHOSEN = Path(os.environ.get("FUSED_MLP_CLOCK_FILE", "/etc/fused-mlp/clock-mhz"))
# Without a measured choice: at this share of the top rate, GPUs of every size hold it under full
# load.
SHARE = 0.75
UNLOCKED = "unlocked"


class ClockError(RuntimeError):
    """The clock is not as it was asked to be."""


def smi(*arguments: str) -> str:
    """The GPU tool's answer; ClockError with its complaint."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise ClockError("there is no nvidia-smi")
    done = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ClockError(lines[-1][:200] if lines else f"nvidia-smi ended with {done.returncode}")
    return done.stdout


def rate() -> int:
    """The rate to lock, in MHz: the host's own choice, else the highest supported one below
    SHARE.
    """
    if CHOSEN.is_file():
        return int(CHOSEN.read_text())
    listed = smi("--query-supported-clocks=graphics", "--format=csv,noheader,nounits")
    supported = sorted({int(word) for word in listed.split() if word.isdigit()})
    if not supported:
        raise ClockError("the GPU names no supported clock")
    return max((mhz for mhz in supported if mhz <= SHARE * supported[-1]), default=supported[0])


def lock() -> str:
    mhz = rate()
    smi(f"--lock-gpu-clocks={mhz},{mhz}")
    return f"locked {mhz} MHz"


def release() -> str:
    smi("--reset-gpu-clocks")
    return UNLOCKED


ACTIONS = {"lock": lock, "release": release}


def serve() -> int:
    """Answer the one word that a client sent on standard input, as the socket's service."""
    word = sys.stdin.readline(16).strip()
    try:
        print(ACTIONS[word]() if word in ACTIONS else "error: lock or release", flush=True)
    except (ClockError, ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", flush=True)
    return 0


def ask(word: str) -> str:
    """What the root service did, or what this process could do itself."""
    if not SOCKET.exists():
        return ACTIONS[word]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(90)
        connection.connect(str(SOCKET))
        connection.sendall(f"{word}\n".encode())
        answer = connection.makefile().readline(300).strip()
    if answer.startswith("error:") or not answer:
        raise ClockError(answer.removeprefix("error:").strip() or "the clock service is silent")
    return answer


def main(words: list[str]) -> int:
    if words == ["serve"]:
        return serve()
    if len(words) != 1 or words[0] not in ACTIONS:
        print(__doc__, file=sys.stderr)
        return 2
    if os.environ.get("FUSED_MLP_DEVICE") == "cpu":
        state = UNLOCKED
    else:
        try:
            state = ask(words[0])
        except (ClockError, ValueError, OSError, subprocess.SubprocessError) as error:
            # Not an error for lock: unlocked results are honest ones. A clock left locked is.
            print(f"::warning::clocks: {error}")
            if words[0] == "release" and SOCKET.exists():
                return 2
            state = UNLOCKED
    print(f"clocks: {state}")
    if output := os.environ.get("GITHUB_OUTPUT"):
        with open(output, "a", encoding="utf-8") as file:
            # The host's own words, made of a fixed text and a number.
            file.write(f"state={state if state.isascii() and state.isprintable() else UNLOCKED}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
