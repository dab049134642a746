#!/bin/sh
# What surprises: the sum of two masks is 1 + 1 = 1 in Triton's interpreter and 1 + 1 = 0 in what is compiled, so a
# kernel that adds conditions where it means "or" passes every test on a CPU and hides the wrong elements on a GPU.
#   Package   triton 3.7.1 (with numpy 2.3.5 and torch 2.13.0), from the Python package index
#   Source    triton/runtime/interpreter.py, create_add: NumPy's add, which is "or" for booleans; compiled, masks are
#             one-bit integers, whose sum LLVM writes as an exclusive or
#   Expected  the same number from both, or an error from both
#   Happens   the interpreter stores 1; the PTX for sm_90 has an `xor.pred` of the two comparisons, which makes 0
#   What to do  join conditions by | and &; count with (x > 0).to(tl.int32)
#   Output seen (Python 3.11.7)
#     interpreted, x = 2: (x > 0) + (x > 1) = 1
#     compiled for sm_90: arith.addi of i1, then xor.pred %p4, %p2, %p3;
# Fails if that changes. Needs a network, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q triton==3.7.1 numpy==2.3.5 torch==2.13.0
cat >"$work/masks.py" <<'PY'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_masks(x_ptr, y_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, (x > 0) + (x > 1))


if sys.argv[1] == "interpreted":
    import torch

    y = torch.full((1,), -1, dtype=torch.int32)
    add_masks[(1,)](torch.tensor([2.0]), y)
    print(f"interpreted, x = 2: (x > 0) + (x > 1) = {y.item()}")
    assert y.item() == 1
else:
    source = ASTSource(add_masks, signature={"x_ptr": "*fp32", "y_ptr": "*i32"})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    assert "arith.addi" in code["ttir"]
    (xor,) = [line.split(None, 0)[0] for line in code["ptx"].splitlines() if "xor.pred" in line]
    print("compiled for sm_90: arith.addi of i1, then", " ".join(xor.split()))
PY
cd "$work"
TRITON_INTERPRET=1 venv/bin/python masks.py interpreted
TRITON_CACHE_DIR="$work/cache" venv/bin/python masks.py compiled
