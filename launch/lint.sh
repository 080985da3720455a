#!/usr/bin/env bash
# Format, lint and types of the whole repository in one command; --fix applies what can be applied.
# Usage: bash launch/lint.sh [--fix]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh --test
bin=.venv/bin
sources=(csrc/*/*.cpp csrc/*/*.cu csrc/*/*.h tests/support/*.h)
python=(--quiet --exclude '*.md' .) # examples in documents keep their aligned comments

if [[ "${1:-}" == --fix ]]; then
    "$bin/ruff" format "${python[@]}"
    "$bin/ruff" check --fix "${python[@]}"
    "$bin/clang-format" -i "${sources[@]}"
fi
"$bin/ruff" format --check "${python[@]}"
"$bin/ruff" check "${python[@]}"
"$bin/mypy" --no-error-summary --explicit-package-bases gact_dist launch
"$bin/clang-format" --dry-run --Werror "${sources[@]}"
