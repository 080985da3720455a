#!/usr/bin/env bash
# Make .venv in the root of the repository and install gact_dist into it; quick if nothing has changed since.
# Usage: bash tools/setup.sh [--test]     --test also installs what the tests and tools/lint.sh need.
# GACT_DIST_SKIP_SETUP=1 in the environment skips all of this and uses .venv as it is.
set -euo pipefail
[[ "${GACT_DIST_SKIP_SETUP:-}" == 1 ]] && exit 0
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=(-r tools/requirements.txt)
stamp=.venv/setup-run.sha256
if [[ "${1:-}" == --test ]]; then
    requirements+=(-r tools/requirements-test.txt)
    stamp=.venv/setup-test.sha256
fi

# The path is part of the hash: a virtual environment holds its own path, and a moved one must be installed again.
fingerprint() {
    {
        pwd
        echo "${requirements[@]}"
        cat tools/requirements*.txt setup.py pyproject.toml
        find csrc -type f -print0 | sort -z | xargs -0 cat
    } | sha256sum
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]]; then
    exit 0
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $(python3 --version 2>&1), the example runs need Python 3.11 or newer as python3" >&2
    exit 2
fi
echo "setup: installing into .venv (some minutes the first time)"
[[ -x .venv/bin/python ]] && .venv/bin/python -c 'import pip' 2>/dev/null || python3 -m venv --clear .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
# DeepSpeed compiles its operators when a job first needs them, not while it is installed.
DS_BUILD_OPS=0 "${pip[@]}" install "${requirements[@]}"
"${pip[@]}" install --no-build-isolation --no-deps -e .
if [[ "${1:-}" == --test ]]; then
    # The one operator of DeepSpeed that the tests need, once and here, where no other process waits for it.
    rm -f .cache/extensions/*/lock
    TORCH_EXTENSIONS_DIR="$PWD/.cache/extensions" DS_ACCELERATOR=cpu PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)' > /dev/null ||
        echo "setup: DeepSpeed's operator was not compiled; it will be when a test needs it" >&2
fi
fingerprint > "$stamp"
