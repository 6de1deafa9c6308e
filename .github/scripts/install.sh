#!/usr/bin/env bash
# What one job needs and no more: a package that is not installed cannot be the one that was taken over.
# usage: install.sh record | report | workflows
set -euo pipefail
cd "$(dirname "$0")/../.."

pip() { python -m pip --disable-pip-version-check "$@"; }

case "${1:-}" in
  record)
    # Joining two runs' samples needs asv's statistics; nothing else of it.
    pip install --no-deps -c constraints.txt asv_runner
    ;;
  report)
    # asv and the judge without torch: nothing is measured here.
    pip install -c constraints.txt asv asv_runner asv-tachyon numpy rich scipy jinja2 virtualenv
    ;;
  workflows)
    pip install -c constraints.txt -e ".[test,ci]"
    # GitHub's own language server lies on npm alone.
    npm install --global --no-audit --no-fund @actions/languageserver@0.3.61
    ;;
  *)
    echo "install.sh: expected record, report or workflows" >&2
    exit 2
    ;;
esac
