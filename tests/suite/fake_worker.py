"""Speaks the worker's protocol with no torch; its job's combinations say how it is to behave."""

import json
import os
import signal
import sys
import time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())


def write(text):
    with open(job["out"], "a") as out:
        out.write(text)


write(json.dumps({"event": "ready", "pid": os.getpid(), "seconds": 0.0}) + "\n")
for key, _wanted in job["combinations"]:
    deed = os.environ.get("FAKE_" + "_".join(key).upper(), "")
    write(json.dumps({"event": "start", "key": key}) + "\n")
    if deed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "torn":
        write('{"event": "result", "met')
        os.abort()
    if deed == "exits":
        print("cannot go on: no such thing", flush=True)
        os._exit(3)
    if deed == "hangs":
        time.sleep(600)
    if deed == "waits":
        Path(os.environ["FAKE_WAITING"]).touch()
        time.sleep(600)
    line = {"key": key, "event": "result", "notes": {}, "seconds": 0.1}
    if deed == "raises":
        line = {"key": key, "event": "failure", "text": "ValueError: wrong", "seconds": 0.1}
    elif deed == "absent":
        line = {"key": key, "event": "absent", "reason": "not installed", "seconds": 0.1}
    else:
        line["metrics"] = {"latency": [1.0] * 5, "cold_start": [2.0], "launches": 3}
    if deed == "poisons":
        line = {"key": key, "event": "failure", "text": "CUDA error", "seconds": 0.1}
        write(json.dumps(line) + "\n")
        os._exit(70)
    write(json.dumps(line) + "\n")
