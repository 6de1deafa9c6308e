#!/usr/bin/env bash
# Refuses a machine that would measure something other than the code: no driver, a busy GPU, no room on
# the disk, somebody's files in the work folder. Says everything that is wrong, not just the first thing.
# usage: preflight.sh, with PYTHON and FUSED_MLP_DEVICE in the environment; exit codes: 0 ready, 2 not
set -uo pipefail

python=${PYTHON:-python3}
device=${FUSED_MLP_DEVICE:-cuda}
least_free_gib=${PREFLIGHT_FREE_GIB:-20}
# An idle GPU with a display or a persistence daemon holds some memory; a process of anyone's holds more.
most_used_mib=${PREFLIGHT_USED_MIB:-1024}
most_busy=${PREFLIGHT_BUSY_PERCENT:-5}
wrong=0

complain() {
  echo "preflight: $*" >&2
  wrong=1
}

query() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null; }

if ! "$python" -c 'import torch, asv' 2>/dev/null; then
  complain "$python has no torch or no asv: run .github/runner/provision.sh on this host"
fi

if [ "$device" = cuda ]; then
  if ! driver=$(query driver_version) || [ -z "$driver" ]; then
    complain "nvidia-smi finds no GPU: is the driver loaded?"
  else
    while IFS=', ' read -r index busy used; do
      if ! [[ "$busy" =~ ^[0-9]+$ && "$used" =~ ^[0-9]+$ ]]; then
        complain "GPU $index does not say how busy it is"
        continue
      fi
      [ "$busy" -le "$most_busy" ] || complain "GPU $index is $busy % busy, at most $most_busy % is idle"
      [ "$used" -le "$most_used_mib" ] || complain "GPU $index has $used MiB in use, at most $most_used_mib"
    done < <(query index,utilization.gpu,memory.used)
    others=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -c '[0-9]')
    [ "$others" -eq 0 ] || complain "$others process(es) hold the GPU: it is measured alone or not at all"
    "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
      complain "torch does not see the GPU that nvidia-smi sees: driver and torch do not fit"
  fi
fi

free_gib=$(($(df --output=avail -k . | tail -n 1) / 1048576))
[ "$free_gib" -ge "$least_free_gib" ] || complain "$free_gib GiB free on the disk, $least_free_gib are needed"

# Ignored files count: an environment or a kernel cache left by another run is what would be measured.
if ! left=$(git status --porcelain --ignored 2>/dev/null); then
  complain "the work folder is not a checkout"
elif [ -n "$left" ]; then
  complain "the work folder is not clean: $(printf '%s' "$left" | head -n 3 | tr '\n' ' ')"
fi

if [ "$wrong" -ne 0 ]; then
  exit 2
fi
echo "preflight: ready ($device, $free_gib GiB free)"
