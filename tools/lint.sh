#!/usr/bin/env bash
# Check format, lint and types of the whole repository; --fix first repairs what can be repaired automatically.
# Usage: bash tools/lint.sh [--fix]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --test
bin=.venv/bin
mapfile -t sources < <(find csrc tests/support tools -name "*.cpp" -o -name "*.cu" -o -name "*.h")

if [[ "${1:-}" == --fix ]]; then
    "$bin/ruff" format --quiet
    "$bin/ruff" check --quiet --fix
    "$bin/clang-format" -i "${sources[@]}"
fi
"$bin/ruff" format --quiet --check
"$bin/ruff" check --quiet
"$bin/mypy" --no-error-summary
"$bin/clang-format" --dry-run --Werror "${sources[@]}"
