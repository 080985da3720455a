#!/usr/bin/env bash
# Build the documentation as a site in docs/_build/html (or in the folder given), without the network; a warning is an
# error. Usage: bash tools/build_docs.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --test
html="${1:-docs/_build/html}"

# -n: a reference that leads nowhere is a warning, too.
.venv/bin/python -m sphinx -b html -c docs -d "$html/.doctrees" -W --keep-going -n -q . "$html"
echo '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">' > "$html/index.html"
echo "docs: $html/index.html"
