#!/bin/sh
# Does the workbook run with every version that pyproject.toml allows? In .bounds/ it makes two environments, of up to
# 6 GB each, which stay for the next time, and runs in the newest all tests and all notebooks, in the oldest what depends
# most on the versions, on the CPU:
#   oldest  every lower bound of pyproject.toml, on the oldest Python here
#   newest  the newest of everything that there is, pinned to nothing, with pyarrow, in which pandas then keeps text, on the newest Python here
# `sh lib/bounds.sh oldest` tries one of them, PYTHON=... with that interpreter. Ends with a line for each.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .bounds

try() {  # name, minor versions of Python in order, tests
    name=$1 minors=$2
    shift 2
    export CS336_VENV=".bounds/$name" CS336_PINS=".bounds/$name.txt"
    for minor in $minors; do  # the first that runs: version managers leave shims that only fail
        [ -n "${PYTHON:-}" ] || ! "python3.$minor" -c '' 2>/dev/null || export PYTHON="python3.$minor"
    done
    # Without a CPU build of this torch, and none is on PyPI, any build will do.
    sh lib/setup.sh || TORCH=$(grep '^torch==' "$CS336_PINS" || echo torch) sh lib/setup.sh || return
    python="$CS336_VENV/bin/python"
    [ "$name" = oldest ] || "$python" -m pip install -qq pyarrow || return
    CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 --dist loadfile --nbval --nbval-current-env "$@"
}

oldest() {
    grep -oE '"[A-Za-z0-9_-]+>=[0-9.]+' pyproject.toml | grep -v setuptools | tr -d '"' | sed 's/>=/==/' >.bounds/oldest.txt
    try oldest '11 12 13 14' tests/kernels tests/labbook/test_*.py tests/test_environment.py notebooks/1[13]_*.ipynb notebooks/2[1347]_*.ipynb
}

newest() {
    : >.bounds/newest.txt
    try newest '14 13 12 11' tests notebooks
}

told='' failed=0
for name in ${1:-oldest newest}; do
    if ("$name"); then outcome=passed; else outcome=FAILED failed=1; fi
    versions=$(".bounds/$name/bin/python" -m pip freeze 2>/dev/null | grep -E '^(torch|triton|numpy|pandas|pyarrow|jupyterlab)==' | xargs)
    told="$told$name $outcome: ${versions:-not installed}
"
done
printf '%s' "$told"
exit "$failed"
