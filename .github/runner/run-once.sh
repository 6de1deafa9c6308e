#!/bin/sh
# Takes one job. The runner writes into its own folder, so each job gets a copy of the one root owns.
set -eu
cp -r /usr/local/lib/fused-mlp/actions-runner runner
jit=$(cat "$1")
rm -f "$1"
cd runner
exec ./run.sh --jitconfig "$jit"
