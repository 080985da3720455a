#!/usr/bin/env bash
# Train a real model on two ranks, first untouched, then with compressed activations; results in runs/demo/.
# Usage: bash launch/demo.sh [--config text|image|graph] [--level L2] [--seed 0] [--steps N]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
exec "$root/.venv/bin/python" "$root/launch/demo.py" "$@"
