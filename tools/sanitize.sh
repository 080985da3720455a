#!/usr/bin/env bash
# Build the native codec and hooks with AddressSanitizer and UndefinedBehaviorSanitizer, and run their tests against it.
# The build is a copy of the package in build/sanitized; the one in gact_dist/ stays. The first finding ends
# the run. The tests of the emulated CUDA kernels are left out: they do not use the library.
# Usage: bash tools/sanitize.sh [--record] [-k NAME ...]
#   --record writes the outcome to benchmarks/results/reliability.json; all other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh --test
record=false
if [[ "${1:-}" == --record ]]; then
    record=true
    shift
fi
python="$PWD/.venv/bin/python"
package="$PWD/build/sanitized/lib"

# Conversions of floats that are out of range are undefined as well, but not part of "undefined".
flags="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
# At -O3 the compiler takes 20 minutes for the sanitized kernels.
export CC="${CC:-gcc}" CXX="${CXX:-g++}" GACT_DIST_LAST_CXXFLAGS="-O1 -g1 -fno-var-tracking"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="$flags" "$python" setup.py --quiet build \
    --build-base build/sanitized --build-lib "$package"
# The extension is optional: a build that fails says so and goes on.
# Not grep -q, which ends nm early: with pipefail that is a failure.
for library in _native _hooks; do
    nm --dynamic "$package/gact_dist/$library.so" | grep __asan_report >/dev/null || {
        echo "sanitize: $library was not built with AddressSanitizer" >&2
        exit 1
    }
done

# The interpreter is not sanitized, so the run-time library must be there first; and the C++ library beside it, as
# AddressSanitizer looks for the functions that throw when it starts. Python never frees all of its memory, so leaks are
# not looked for: benchmarks/reliability/endurance.py does that.
preload="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libstdc++.so)"
options=detect_leaks=0:halt_on_error=1
outcome="$(mktemp)"
trap 'rm -f "$outcome"' EXIT
# --capture=sys: a finding ends the process, and with it what pytest holds of the file descriptors.
LD_PRELOAD="$preload" ASAN_OPTIONS="$options" UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    PYTHONPATH="$package" \
    "$python" -m pytest -q --capture=sys -p no:cacheprovider -o pythonpath="$package ." tests/codec tests/hooks/test_settled.py \
    --ignore-glob="*test_cuda_*" --ignore-glob="*test_nvrtc*" --ignore-glob="*test_driver*" --ignore-glob="*test_ptx*" "$@" | tee "$outcome"
if $record; then
    "$python" -m benchmarks.reliability.results benchmarks/results/reliability.json sanitizers \
        "compiler=$("$CXX" --version | head -n 1)" "flags=$flags $GACT_DIST_LAST_CXXFLAGS" "outcome=$(tail -n 1 "$outcome")"
fi
