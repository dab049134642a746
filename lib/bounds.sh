#!/bin/sh
# Does the workbook run with every version that pyproject.toml allows? In .bounds/ it makes three environments, of up to
# 6 GB each, which stay for the next time, and runs in the newest all tests and all notebooks, in the others what depends
# most on the versions, on the CPU:
#   oldest  every lower bound of pyproject.toml
#   newest  the newest of everything that there is, pinned to nothing, with pyarrow, in which pandas then keeps text
#   mixed   as images for GPUs have it: the oldest torch and triton, NumPy's newest, pandas 3.0 and pyarrow
# `sh lib/bounds.sh mixed` tries one of them, PYTHON=... with that interpreter. Ends with a line for each.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .bounds
lowest=$(grep -oE '"[A-Za-z0-9_-]+>=[0-9.]+' pyproject.toml | grep -v setuptools | tr -d '"' | sed 's/>=/==/')

pins_of() {
    case $1 in
        oldest) echo "$lowest" ;;
        newest) ;;
        mixed) echo "$lowest" | grep -E '^(torch|triton)=='; echo 'pandas==3.0.*' ;;
        *) echo "no environment $1; allowed: oldest, newest, mixed" >&2; exit 2 ;;
    esac
}

try() {
    export CS336_VENV=".bounds/$1" CS336_PINS=".bounds/$1.txt"
    pins_of "$1" >"$CS336_PINS"
    # Without a CPU build of this torch, and none is on PyPI, any build will do.
    sh lib/setup.sh || TORCH=$(grep '^torch==' "$CS336_PINS" || echo torch) sh lib/setup.sh || return
    python="$CS336_VENV/bin/python"
    [ "$1" = oldest ] || "$python" -m pip install -qq -c "$CS336_PINS" pyarrow || return
    case $1 in
        newest) set -- tests notebooks ;;
        *) set -- tests/kernels tests/labbook/test_*.py tests/test_environment.py notebooks/1[13]_*.ipynb notebooks/2[1347]_*.ipynb ;;
    esac
    CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 --dist loadfile --nbval --nbval-current-env "$@"
}

outcomes=''
for name in ${1:-oldest newest mixed}; do
    if (try "$name"); then outcome=passed; else outcome=FAILED; fi
    outcomes="$outcomes$name $outcome
"
done
printf '%s' "$outcomes"
case $outcomes in *FAILED*) exit 1 ;; esac
