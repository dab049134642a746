"""The fused kernels compile for a GPU, at the 8B model's sizes, within its registers and shared memory."""

import pandas as pd
import pytest

pytest.importorskip("triton")
from cs336_systems.attention.compile_resources import SHARED_LIMIT, in_own_process

# Launches of tensors without memory are noted, and compiled for a GPU that need not be there.
PROGRAM = """
import torch, warnings
from cs336_systems.attention.compile_resources import Chip, ask_ptxas
from cs336_systems.kernels import cross_entropy, rms_norm, rotary, runtime, swiglu, weighted_sum

tokens, width, gate, vocabulary = 32_768, 4096, 11_008, 151_936
triton.runtime.driver.set_active(Chip(90))
runtime.sm_count = lambda device: 132
launched = []
def note(kernel, grid, *arguments, **options):
    launched.append((kernel, arguments, options))
for module in (cross_entropy, rms_norm, rotary, swiglu, weighted_sum):
    module.launch_kernel = note
for dtype in (torch.bfloat16, torch.float32):
    make = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")
    x = make(tokens, width)
    w = make(width)
    r = make(tokens, dtype=torch.float32)
    a = make(tokens, gate)
    table = make(tokens, 64, dtype=torch.float32)
    heads = x.view(1, tokens, 32, 128).transpose(1, 2)
    logits = make(4096, vocabulary)
    targets = make(4096, dtype=torch.int64)
    rms_norm.forward.__wrapped__(x, w, 1e-5)
    rms_norm.backward.__wrapped__(x, x, w, r, x)
    rotary.rotate.__wrapped__(heads, table, table, True)
    swiglu.forward.__wrapped__(a, a)
    swiglu.launch_backward(a, a, a, a, a, a)
    cross_entropy._overwrite.__wrapped__(logits, targets)
    weighted_sum.forward.__wrapped__(x, w)
    weighted_sum.backward.__wrapped__(make(tokens), x, w)
warnings.simplefilter("error")
rows = []
for kernel, arguments, options in launched:
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    ptx = compiled.asm["ptx"]
    row = {"kernel": kernel.__name__, "shared_bytes": compiled.metadata.shared, "fused": "fma.rn" in ptx}
    rows.append(row | ask_ptxas(ptx, 90))
print(json.dumps(rows))
"""


def test_no_kernel_spills_on_hopper():
    """The interpreter would run what no compiler takes."""
    rows = pd.DataFrame(in_own_process(PROGRAM, None))
    assert len(rows) == 16
    # Triton 3.10 would round products apart; 3.9 would warn of it, which is an error above.
    assert set(rows[rows["fused"]]["kernel"]) >= {"rotary_kernel"}, rows.to_string()
    assert (rows["spilled_bytes"] == 0).all(), rows.to_string()
    assert (rows["shared_bytes"] <= min(SHARED_LIMIT.values())).all(), rows.to_string()
