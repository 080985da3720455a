#!/usr/bin/env bash
# Set up the environment, check format, lint and types, then run the tests and list the slowest twenty.
# Usage: bash launch/test.sh [--all] [-k NAME ...]     --all runs all cases; all arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --test
.venv/bin/python -m examples.train.data
bash tools/lint.sh
# Three files at a time: many tests use one core, and those on several ranks wait for one another. In their order, in
# which long files are not the last.
# Ranks and scripts import the same modules in hundreds of processes: a compiled copy is to be kept of each.
export PYTHONDONTWRITEBYTECODE=
exec .venv/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=20 "$@"
