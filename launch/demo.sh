#!/usr/bin/env bash
# Train a real model on two ranks, first untouched, then with compressed activations; results in runs/demo/.
# Usage: bash launch/demo.sh [--config text|image|graph] [--level L2] [--seed 0] [--steps N]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/tools/setup.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # the caller's folder may be another one
exec "$root/.venv/bin/python" -m examples.train.demo "$@"
