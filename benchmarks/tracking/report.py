"""Publish the HTML report and show it in a browser, from this machine alone.

Example:
  python -m benchmarks report              publish and serve on http://127.0.0.1:8765/
  python -m benchmarks report --no-serve   publish only; the pages lie in .asv/html
"""

from __future__ import annotations

import argparse
import functools
import http.server
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from .changes import PAGE


def finish(html_dir: Path) -> None:
    """Make asv's pages open with the network off, and link our own page from them.

    asv's stock page loads ten scripts from content networks; asv-tachyon's shows the same data with
    every asset inside.
    """
    static = files("asv_tachyon") / "static"
    assets = html_dir / "assets"
    shutil.rmtree(assets, ignore_errors=True)
    shutil.copytree(str(static / "assets"), assets)
    shutil.copy(str(static / "favicon.svg"), html_dir / "favicon.svg")
    page = (static / "index.html").read_text()
    # Modules with `crossorigin` are refused by browsers that open the page from a folder.
    page = re.sub(r"\s+crossorigin", "", page)
    link = (
        f'<a href="./{PAGE}" style="position:fixed;right:1rem;bottom:1rem;z-index:99;'
        "padding:.5rem .9rem;border-radius:.5rem;background:#1f6feb;color:#fff;"
        'font:600 14px system-ui,sans-serif;text-decoration:none">What changed</a>'
    )
    page = page.replace('<div id="root"></div>', f'<div id="root"></div>\n    {link}')
    (html_dir / "index.html").write_text(page)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of the dozens of requests a page makes."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve(html_dir: Path, port: int) -> int:
    """Serve on loopback only: `asv preview` would listen on every interface."""
    handler = functools.partial(_Quiet, directory=str(html_dir))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        print(
            f"port {port} is taken ({error.strerror}): choose another with --port", file=sys.stderr
        )
        return 2
    address = f"http://127.0.0.1:{server.server_port}/"
    print(f"report at {address}  what changed at {address}{PAGE}  (Ctrl-C stops)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 (any that is free) to 65535")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=8765, help="port on 127.0.0.1 (default 8765)")
    parser.add_argument("--no-serve", action="store_true", help="publish only")
    parser.add_argument(
        "--html-dir", type=Path, default=Path(".asv/html"), help="where the pages go (.asv/html)"
    )


def run(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "-o", str(args.html_dir)]
    if subprocess.run(command, check=False).returncode:
        return 2
    return 0 if args.no_serve else serve(args.html_dir, args.port)
