#!/usr/bin/env bash
# Format, lint and types of the whole repository in one command; --fix applies what can be applied.
# Usage: bash launch/lint.sh [--fix]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --test
bin=.venv/bin
sources=(csrc/*.cpp csrc/*.h)

if [[ "${1:-}" == --fix ]]; then
    "$bin/ruff" format --quiet .
    "$bin/ruff" check --fix --quiet .
    "$bin/clang-format" -i "${sources[@]}"
fi
"$bin/ruff" format --check --quiet .
"$bin/ruff" check --quiet .
"$bin/mypy" --no-error-summary gact_dist
"$bin/clang-format" --dry-run --Werror "${sources[@]}"
