"""Compiles the fused kernels for a GPU that need not be there, at the 8B model's sizes: a program of its own.

TRITON_INTERPRET=0 python tests/kernels/compile_fused.py 90
"""

import json
import sys

import torch
import triton

from cs336_systems.attention.compile_resources import Chip, ask_ptxas
from cs336_systems.kernels import cross_entropy, rms_norm, rotary, swiglu
from cs336_systems.kernels.runtime import row_tile

TOKENS, WIDTH, GATE, VOCABULARY = 32_768, 4096, 11_008, 151_936


def launches(dtype):
    """Kernel, arguments and options of each, as their launchers choose them."""

    def make(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w, r = make(TOKENS, WIDTH), make(WIDTH), make(TOKENS, dtype=torch.float32)
    partial, tile = (
        make(264, WIDTH, dtype=torch.float32),
        row_tile(TOKENS, WIDTH, rms_norm.TILE, rms_norm.WIDEST, 32),
    )
    sizes = (WIDTH, TOKENS, WIDTH, 1e-5)
    yield "rms_norm forward", rms_norm.rms_norm_forward_kernel, (x, w, x, r, *sizes), tile
    sizes = (WIDTH, WIDTH, TOKENS, WIDTH, 125)
    yield (
        "rms_norm backward",
        rms_norm.rms_norm_backward_kernel,
        (x, x, w, r, x, x, partial, *sizes),
        tile | {"STAGES": 3, "HAS_RESIDUAL": True},
    )
    table, strides = make(TOKENS, 64, dtype=torch.float32), (TOKENS * WIDTH, 128, WIDTH) * 2
    options = {"INVERSE": True, "ROWS": 16, "PAIRS": 64, "num_warps": 4}
    yield "rotary", rotary.rotary_kernel, (x, table, table, x, *strides, 32, TOKENS, 128), options
    a, block = make(TOKENS * GATE), {"BLOCK": swiglu.BLOCK}
    yield "swiglu forward", swiglu.swiglu_forward_kernel, (a, a, a, TOKENS * GATE), block
    arguments = (*[a] * 6, TOKENS * GATE)
    yield "swiglu backward", swiglu.swiglu_backward_kernel, arguments, block | {"WITH_C": True}
    logits, targets = make(4096, VOCABULARY), make(4096, dtype=torch.int64)
    sizes, tile = (
        (VOCABULARY, 4096, VOCABULARY, -100),
        row_tile(4096, VOCABULARY, cross_entropy.TILE, cross_entropy.TILE, 16),
    )
    yield "cross_entropy", cross_entropy.cross_entropy_kernel, (logits, targets, r, *sizes), tile


if __name__ == "__main__":
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(Chip(capability))
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, kernel, arguments, options in launches(dtype):
            compiled = kernel.warmup(*arguments, grid=(1,), **options)
            asked = ask_ptxas(compiled.asm["ptx"], capability) | {"shared_bytes": compiled.metadata.shared}
            rows.append({"kernel": name, "dtype": str(dtype)} | asked)
    print(json.dumps(rows))
