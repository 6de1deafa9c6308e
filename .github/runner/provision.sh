#!/usr/bin/env bash
# Makes a bare CUDA host (driver installed, systemd, Python 3.11 or newer) the benchmark runner: no
# containers. Safe to run again: after an update of this repository it brings the host up to date.
#
# usage: provision.sh --organization NAME --group-id N --runner FILE.tar.gz --sha256 HASH --token FILE
#                     [--clock-mhz N] [--prefix FOLDER] [--dry-run]
#
# --runner and --sha256: GitHub's own runner and its checksum, from its release page
# --token: a file with a token that may register runners of the organization and do nothing else
# --prefix: write below FOLDER and start nothing (for a look, and for tests)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

organization='' group='' runner='' sha256='' token='' clock='' prefix='' dry=''
fail() {
  echo "provision: $*" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run)
      dry=1
      shift
      continue
      ;;
    --help | -h)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit 0
      ;;
  esac
  [ $# -ge 2 ] || fail "$1 needs a value"
  case "$1" in
    --organization) organization=$2 ;;
    --group-id) group=$2 ;;
    --runner) runner=$2 ;;
    --sha256) sha256=$2 ;;
    --token) token=$2 ;;
    --clock-mhz) clock=$2 ;;
    --prefix) prefix=$2 ;;
    *) fail "unknown option $1; see --help" ;;
  esac
  shift 2
done

[[ "$organization" =~ ^[A-Za-z0-9-]{1,39}$ ]] || fail "--organization: expected an organization's name"
[[ "$group" =~ ^[0-9]+$ ]] || fail "--group-id: expected the number of the runner group"
[[ "$group" != 1 ]] || fail "--group-id 1 is the default group, open to every workflow: make one of its own"
[[ "$sha256" =~ ^[0-9a-f]{64}$ ]] || fail "--sha256: expected 64 hexadecimal digits"
[[ -z "$clock" || "$clock" =~ ^[0-9]{3,4}$ ]] || fail "--clock-mhz: expected a rate in MHz"
[ -f "$runner" ] || fail "--runner: no such file: $runner"
[ -s "$token" ] || fail "--token: no such file, or empty: $token"
echo "$sha256  $runner" | sha256sum --check --status || fail "$runner is not the file that $sha256 names"
[ -n "$prefix" ] || [ -n "$dry" ] || [ "$(id -u)" = 0 ] || fail "needs root (or --prefix, or --dry-run)"

lib=$prefix/usr/local/lib/fused-mlp etc=$prefix/etc/fused-mlp units=$prefix/etc/systemd/system
venv=$prefix/opt/fused-mlp/venv

do_() {
  if [ -n "$dry" ]; then
    printf 'would run:'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}
host() { [ -n "$prefix" ] || do_ "$@"; }

# Owned by root and read by the job: measured code can change none of it for the job after it.
do_ mkdir -p "$lib/actions-runner" "$etc" "$units" "$(dirname "$venv")"
do_ tar -xzf "$runner" -C "$lib/actions-runner" --no-same-owner
for file in clean.sh jit.sh run-once.sh; do
  do_ install -m 0755 "$here/$file" "$lib/$file"
done
for file in clocks.py register.py; do
  do_ install -m 0644 "$here/$file" "$lib/$file"
done
for unit in "$here"/fused-mlp-*.service "$here"/fused-mlp-*.socket; do
  do_ install -m 0644 "$unit" "$units/$(basename "$unit")"
done
do_ install -m 0600 "$token" "$etc/token"
settings=$(mktemp)
trap 'rm -f "$settings"' EXIT
printf 'ORGANIZATION=%s\nRUNNER_GROUP_ID=%s\n' "$organization" "$group" >"$settings"
do_ install -m 0600 "$settings" "$etc/runner.env"
if [ -n "$clock" ]; then
  echo "$clock" >"$settings"
  do_ install -m 0644 "$settings" "$etc/clock-mhz"
fi

# torch is gigabytes and pinned: installed once here, never by a job.
host python3 -m venv "$venv"
host "$venv/bin/python" -m pip install --upgrade -c "$root/constraints.txt" "${root}[bench]"
# The package itself is what is measured; each commit brings its own.
host "$venv/bin/python" -m pip uninstall --yes fused_mlp

getent group fused-mlp-clocks >/dev/null 2>&1 || host groupadd --system fused-mlp-clocks
host systemctl daemon-reload
host systemctl enable --now fused-mlp-clocks.socket fused-mlp-runner.service
echo "provision: done; now limit runner group $group to bench.yml on main (.github/README.md)"
