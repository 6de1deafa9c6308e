"""``python -m benchmarks COMMAND``: what asv has no command for."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

# command -> (module with add_arguments(parser) and run(args) -> exit code, one line of help)
COMMANDS = {
    "doctor": (".tracking.doctor", "say what this machine can measure, and how finely"),
    "aa": (".tracking.aa", "measure a commit against itself: the noise of each benchmark"),
    "bisect": (".tracking.gate.bisect", "find the commit that made a benchmark slower"),
    "gate": (".tracking.gate.command", "judge a commit against another from what was measured"),
    "history": (".tracking.history", "keep every measured point on the branch `results`"),
    "notify": (".tracking.github.command", "tell GitHub the verdict: comment, status, issues"),
    "providers": (".tracking.providers", "compare fused with eager and others in one run"),
    "quantized": (
        ".suite.harness.quantized_report",
        "right answers, size and speed of every quantization mode",
    ),
    "replay": (".tracking.replay.command", "the gate's error rates on a recorded history"),
    "report": (".tracking.report", "publish the HTML report and show it on this machine"),
}

EXIT_CODES = """\
exit codes:
  0 pass   1 regressed   2 bad usage or broken infrastructure
  3 inconclusive   4 nothing measured"""


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name, __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("benchmarks"):
            raise
        print(
            f'{error.name} is not installed: pip install -c constraints.txt -e ".[bench]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Judge, replay, report and keep what asv measured.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = sys.argv[1:] if argv is None else argv
    for name, (module_name, text) in COMMANDS.items():
        # Only the chosen command's module is imported: the others' imports cost seconds.
        chosen = arguments[:1] == [name]
        module = _load(module_name) if chosen else None
        subparser = subparsers.add_parser(
            name,
            help=text,
            description=(module.__doc__ if module else text),
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module:
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
