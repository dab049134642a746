"""The same input again and again, by each of attention's kernels that Hopper runs: races would show.

    python -m tests.attention.races                                        a hundred times each
    compute-sanitizer --tool memcheck python -m tests.attention.races --times 1
    compute-sanitizer --tool racecheck python -m tests.attention.races --times 1
    python -m tests.attention.races --forward 10000          Hopper's forward alone: is P overwritten?

The last is for each assembler that comes into use: up to 13.2 they can be wrong about a left operand in
registers while its matmul runs (Triton's issue 9433, pull request 11781), which P is. It runs the forward so
often on each of ten shapes, by itself and beside matmuls on another stream, and counts the numbers of O and L
whose bits are not the first run's; once it compares O with float64. TRITON_PTXAS_PATH, from Triton 3.9 on
TRITON_PTXAS_BLACKWELL_PATH, names another assembler.

Sizes are small, for the sanitizer. Its racecheck names two things that are no races: Triton's hand-over to
warps with roles, in Hopper's forward and backward, which barriers of the whole block order; and in the
forward the next item's store and load, which an mbarrier orders, and racecheck does not know those.
Exit code 1: results differ or are wrong, or other kernels ran than races.csv says.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from cs336_systems.attention import FlashAttentionTriton
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.hopper_common import has_registers_for_backward
from cs336_systems.attention.launcher import Launcher, contiguous, tuning_for
from cs336_systems.attention.tiles import Tuning
from cs336_systems.checks import AttentionCase, check_attention


def rows_of(name: str) -> list[dict]:
    """Rows of a table of cases; leading dimensions stand in one cell."""
    table = pd.read_csv(Path(__file__).with_name(name), comment="#", dtype={"leading": str})
    rows = table.fillna({"leading": ""}).to_dict("records")
    for row in rows:
        row["leading"] = tuple(map(int, row["leading"].split()))
    return rows


# The case, its dtype, and the kernels that run it.
CASES = []
for row in rows_of("races.csv"):
    dtype = getattr(torch, row.pop("dtype"))
    kernels = row.pop("kernels")
    CASES.append((AttentionCase(**row), dtype, kernels))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attention.races", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--forward", type=int, metavar="TIMES")
    options = parser.parse_args()
    times = options.times if options.forward is None else options.forward
    if times < 1:
        parser.error(f"{times} times; allowed: 1 or more")
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not is_hopper:
        parser.error("the cases are for a Hopper GPU, and torch sees none here")
    print(f"Triton {triton.__version__}, ptxas {get_ptxas(90).version}")
    wrong = 0
    for case, dtype, wanted in CASES:
        if not has_registers_for_backward():
            wanted = wanted.replace("hopper_backward", "dq, dkdv")
        tuning = tuning_for(dtype, case.d, torch.device("cuda"))
        launched = launched_of(case, tuning)
        wrong += launched != wanted
        if options.forward is None:
            differing = what_differs(case, dtype, times)
            print(case.name, launched, differing or "the same every time", sep=": ", flush=True)
        elif launched.startswith("hopper_forward"):
            differing = [
                numbers_that_differ(case, dtype, times, beside) for beside in (False, True)
            ]
            counts = "{} numbers differ in {} runs alone, {} in as many beside matmuls"
            said = counts.format(differing[0], times, differing[1])
            print(case.name, launched, said, sep=": ", flush=True)
            check_attention(FlashAttentionTriton.apply, cases=[case], dtype=dtype, backward=False)
        else:
            differing = ()
        wrong += any(differing)
    return bool(wrong)


def numbers_that_differ(case: AttentionCase, dtype: torch.dtype, times: int, beside: bool) -> int:
    """How many numbers of O and L have other bits than in the first run; beside matmuls on another stream."""
    q, k, v, _ = random_inputs(case, dtype)
    first = flash_forward(q, k, v, case.is_causal)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(times):
        if beside:
            with torch.cuda.stream(stream):
                torch.mm(a, a, out=product)
        again = flash_forward(q, k, v, case.is_causal)
        for x, once in zip(again, first, strict=True):
            bits = torch.int16 if x.itemsize == 2 else torch.int32
            has_changed = x.view(bits) != once.view(bits)
            differing += has_changed.sum()
    return differing.item()


def launched_of(case: AttentionCase, tuning: Tuning) -> str:
    """By forward and backward, as races.csv writes them."""
    q, k = (contiguous(case.leading + (n, case.d)) for n in (case.n_queries, case.n_keys))
    forward = Launcher((q, k, k, q), tuning, case.is_causal).plan
    backward = Launcher((q, k, k, q, q, q, k, k), tuning, case.is_causal).plan
    ((kernel, tile),) = forward.tiles.items()
    if kernel == "hopper_forward":
        kernel += f" {tile.block_m}x{tile.block_n}"
    if forward.persistent:
        kernel += " persistent"
    return ", ".join([kernel] + list(backward.tiles))


def random_inputs(case: AttentionCase, dtype: torch.dtype) -> list[torch.Tensor]:
    """Q, K, V, dO."""
    lengths = case.n_queries, case.n_keys, case.n_keys, case.n_queries
    return [torch.randn(*case.leading, n, case.d, device="cuda").to(dtype) for n in lengths]


def both_passes(q, k, v, do, is_causal=True) -> tuple[torch.Tensor, ...]:
    """O, L, in float32 its residual, dQ, dK, dV."""
    outputs = flash_forward(q, k, v, is_causal)
    o, lse, *residual = outputs
    gradients = flash_backward(do, q, k, v, o, lse, is_causal, *residual)
    return tuple(outputs) + tuple(gradients)


def what_differs(case: AttentionCase, dtype: torch.dtype, times: int) -> list[str]:
    """The outputs that are not the same every time; dQ up to a rounding: programs add to it as they come."""
    q, k, v, do = random_inputs(case, dtype)
    first = {}
    differing = set()
    for _ in range(times):
        o, lse, *_, dq, dk, dv = both_passes(q, k, v, do, case.is_causal)
        exact = {"O": o, "L": lse, "dK": dk, "dV": dv}
        first = first or exact | {"dQ": dq}
        differing |= {name for name, x in exact.items() if not torch.equal(x, first[name])}
        largest = first["dQ"].nan_to_num().abs().max()
        rounding = 1e-5 * largest.item()
        if not torch.allclose(dq, first["dQ"], rtol=2**-7, atol=rounding):
            differing.add("dQ")
    return sorted(differing)


if __name__ == "__main__":
    sys.exit(main())
