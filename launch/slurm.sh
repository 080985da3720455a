#!/usr/bin/env bash
#SBATCH --job-name=gact_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
# One torchrun on each node of a SLURM job; they meet at the first node.
# Usage: sbatch launch/slurm.sh [arguments of python -m examples.train ...]
# Submit it from the root of a checkout that all nodes see. Run `bash tools/setup.sh` and
# `.venv/bin/python -m examples.train.data` there once before, on a node that reaches a package index.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch from the root of the checkout}"
first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun .venv/bin/python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:29500" \
    -m examples.train "$@"
