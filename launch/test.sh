#!/usr/bin/env bash
# Set up the environment, check format, lint and types, then run the tests. Arguments go to pytest.
# Usage: bash launch/test.sh [-k NAME ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --test
.venv/bin/python launch/data.py
bash launch/lint.sh
# Without a path among the arguments, pytest takes the folder that pyproject.toml names. Two files at a time: many tests
# use one core, and those on several ranks wait for one another.
exec .venv/bin/python -m pytest -q -n 2 --dist loadfile "$@"
