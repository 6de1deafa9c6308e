#!/usr/bin/env bash
# Builds sdist and wheel, checks both, and proves that the wheel installs. With TAG set, the tag must be
# the version's and lie on main.
# usage: build.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: build.sh FOLDER}

if [ -n "${TAG:-}" ]; then
  version=$(python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
  if [ "$TAG" != "v$version" ]; then
    echo "build.sh: the tag is $TAG but pyproject.toml says $version" >&2
    exit 2
  fi
  git fetch --quiet origin main
  if ! git merge-base --is-ancestor HEAD FETCH_HEAD; then
    echo "build.sh: the tagged commit does not lie on main" >&2
    exit 2
  fi
fi

python -m pip install -c constraints.txt build twine
python -m build --outdir "$out"
python -m twine check --strict "$out"/*

room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python -m pip install --no-deps --target "$room" "$out"/*.whl
test -f "$room/fused_mlp/py.typed"
