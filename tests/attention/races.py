"""The same input again and again, by each of attention's kernels that Hopper runs: races would show.

    python -m tests.attention.races                                        a hundred times each
    compute-sanitizer --tool memcheck python -m tests.attention.races --times 1
    compute-sanitizer --tool racecheck python -m tests.attention.races --times 1
    python -m tests.attention.races --times 10000            is P overwritten?

The last is for each assembler that comes into use: up to 13.2 they can be wrong about a left operand in
registers while its matmul runs (Triton's issue 9433, pull request 11781), which P is. TRITON_PTXAS_PATH, from
Triton 3.9 on TRITON_PTXAS_BLACKWELL_PATH, names another assembler.

Sizes are small, for the sanitizer. Its racecheck names two things that are no races: Triton's hand-over to
warps with roles, in Hopper's forward and backward, which barriers of the whole block order; and in the
forward the next item's store and load, which an mbarrier orders, and racecheck does not know those.
Exit code 1: results differ, or other kernels ran than races.csv says.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.hopper_common import has_registers_for_backward
from cs336_systems.attention.launcher import Launcher, contiguous, tuning_for
from cs336_systems.attention.tiles import Tuning
from cs336_systems.checks import AttentionCase


def rows_of(name: str) -> list[dict]:
    """Rows of a table of cases; leading dimensions stand in one cell."""
    path = Path(__file__).with_name(name)
    table = pd.read_csv(path, comment="#", dtype={"leading": str})
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
    prog = "python -m tests.attention.races"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the cases are for a Hopper GPU, and torch sees none here")
    print(f"Triton {triton.__version__}, ptxas {get_ptxas(90).version}")
    wrong = False
    for case, dtype, wanted in CASES:
        if not has_registers_for_backward():
            wanted = wanted.replace("hopper_backward", "dq, dkdv")
        tuning = tuning_for(dtype, case.d, torch.device("cuda"))
        launched = launched_of(case, tuning)
        differing = what_differs(case, dtype, options.times)
        print(case.name, launched, differing or "the same every time", sep=": ", flush=True)
        wrong |= bool(differing) or launched != wanted
    return int(wrong)


def launched_of(case: AttentionCase, tuning: Tuning) -> str:
    """By forward and backward, as races.csv writes them."""
    q = contiguous(case.leading + (case.n_queries, case.d))
    k = contiguous(case.leading + (case.n_keys, case.d))
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

    def draw(n: int) -> torch.Tensor:
        return torch.randn(*case.leading, n, case.d, device="cuda").to(dtype)

    return list(map(draw, (case.n_queries, case.n_keys, case.n_keys, case.n_queries)))


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
        for name, x in exact.items():
            if not torch.equal(x, first[name]):
                differing.add(name)
        first_dq = first["dQ"]
        largest = first_dq.nan_to_num().abs().max().item()
        if not torch.allclose(dq, first_dq, rtol=2**-7, atol=1e-5 * largest):
            differing.add("dQ")
    return sorted(differing)


if __name__ == "__main__":
    sys.exit(main())
