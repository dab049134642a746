#!/bin/sh
# What surprises: tl.fma, which is asked for where one rounding matters (the part of a product that is lost, sums of
# two numbers), rounds twice in Triton's interpreter, so such code loses there what it keeps on a GPU.
#   Package   triton 3.7.1 (with numpy 2.3.5 and torch 2.13.0), from the Python package index
#   Source    triton/runtime/interpreter.py, create_fma: NumPy's product, then its sum; compiled it is one fma.rn.f32
#   Expected  a fused multiply-add: x * x - rounded(x * x) is 2^-24 for x = 1 + 2^-12
#   Happens   the interpreter stores 0; compiled for sm_90 the PTX has fma.rn.f32, which makes 2^-24 (C's fma says so)
#   What to do  in tests under the interpreter, allow two roundings, or make the product in float64 there;
#             Triton 3.9 rounds once
#   Output seen (Python 3.11.7)
#     interpreted: tl.fma(x, x, -1 - 2^-11) = 0.0, exact: 5.960464477539063e-08
#     compiled for sm_90: fma.rn.f32, once
# Fails if that changes. Needs a network, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 numpy==2.3.5 torch==2.13.0
cat >"$work/lost.py" <<'PY'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def lost_by_rounding(x_ptr, rounded_ptr, y_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, tl.fma(x, x, -tl.load(rounded_ptr)))


if sys.argv[1] == "interpreted":
    import torch

    x = torch.tensor([1 + 2**-12])
    rounded = x * x
    y = torch.full((1,), -1.0)
    lost_by_rounding[(1,)](x, rounded, y)
    exact = (x.double() ** 2 - rounded.double()).item()
    print(f"interpreted: tl.fma(x, x, -1 - 2^-11) = {y.item()}, exact: {exact}")
    assert rounded.item() == 1 + 2**-11 and exact == 2**-24
    assert y.item() == 0
else:
    signature = {"x_ptr": "*fp32", "rounded_ptr": "*fp32", "y_ptr": "*fp32"}
    source = ASTSource(lost_by_rounding, signature=signature)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ptx.count("fma.rn.f32") == 1 and "mul.f32" not in ptx
    print("compiled for sm_90: fma.rn.f32, once")
PY
cd "$work"
TRITON_INTERPRET=1 venv/bin/python lost.py interpreted
TRITON_CACHE_DIR="$work/cache" venv/bin/python lost.py compiled
