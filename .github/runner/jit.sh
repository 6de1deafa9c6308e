#!/bin/sh
# Registers one runner and leaves its configuration to the job's user. Run as root.
set -eu
umask 077
/usr/bin/python3 /usr/local/lib/fused-mlp/register.py "$1"
chown --reference="$(dirname "$1")" "$1"
