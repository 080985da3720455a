#!/usr/bin/env bash
# Train one of the example models with the deepspeed launcher, on all GPUs of this machine (on two CPU processes if it
# has none).
# Usage: bash launch/deepspeed.sh CONFIG.json [arguments of python -m examples.train ...]
#        bash launch/deepspeed.sh configs/deepspeed/zero2.json --config text --level L2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config="${1:?usage: bash launch/deepspeed.sh CONFIG.json [arguments of python -m examples.train ...]}"
shift
bash tools/setup.sh --test # DeepSpeed is installed with what the tests need
.venv/bin/python -m examples.train.data
gpus="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$PWD/.venv/bin:$PATH"
if [[ "$gpus" != 0 ]]; then
    exec .venv/bin/deepspeed --num_gpus "$gpus" --module examples.train --deepspeed "$config" "$@"
fi
export DS_ACCELERATOR=cpu
exec .venv/bin/deepspeed --num_accelerators 2 --module examples.train --deepspeed "$config" "$@"
