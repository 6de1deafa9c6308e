#!/bin/sh
# Empties a job's folder, and stops if it is asked to empty anything else. Run as root.
set -eu
case "${1:-}" in
  */fused-mlp-job) ;;
  *)
    echo "clean.sh: ${1:-nothing} is not a job's folder" >&2
    exit 2
    ;;
esac
# With DynamicUser the folder is a link into a private one; what it holds goes, it stays.
[ -d "$1" ] || exit 0
find -H "$1" -mindepth 1 -xdev -delete
