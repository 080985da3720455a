#!/usr/bin/env bash
# Train one of the example models with torchrun, on all GPUs of this machine (on two CPU processes if it has none).
# Usage: bash launch/torchrun.sh [RANKS] [arguments of python -m examples.train ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=""
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    ranks="$1"
    shift
fi
bash tools/setup.sh
.venv/bin/python -m examples.train.data
if [[ -z "$ranks" ]]; then
    ranks="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    -m examples.train "$@"
