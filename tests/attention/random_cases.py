"""Random cases of the Triton attention against float64, forward and backward, in parallel processes.

    python -m tests.attention.random_cases                      half a minute
    python -m tests.attention.random_cases --seconds 120 --processes 32 --seed 7

Head sizes of 16 to 256 and odd ones, 17 to 2,000 queries and keys, three dtypes, causal or not, strided,
sliced and offset inputs. Each is held to `check_attention`. (Of few keys or large scores chance decides who
is how far off: gpu_cases.yaml has some.) Only for GPUs: interpreted, it is too slow.
Exit code 1: a case is too far off, or there were none.
"""

import argparse
import os
import random
import sys
import time
from functools import partial

import torch
from tests.layouts import DTYPES, LAYOUTS

from cs336_systems.attention import FlashAttentionTriton
from cs336_systems.checks import AttentionCase, check_attention

HEAD_SIZES = (16, 32, 33, 40, 64, 64, 80, 96, 128, 128, 256)
CASES_OF_A_FORM = 100  # of what Triton compiles for, which takes longer than a case
LARGEST = 2**24  # scores of a case: some gigabytes in float64


def main() -> int:
    prog = "python -m tests.attention.random_cases"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    # One for each core: they compile.
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.processes)
    with torch.multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(partial(run, options.seconds), seeds)
    count = sum(of_process for of_process, _ in results)
    failures = [line for _, lines in results for line in lines]
    print(*failures, f"{count:,} cases, {len(failures)} failed", sep="\n")
    return bool(failures or not count)


def run(seconds: float, seed: int) -> tuple[int, list[str]]:
    """How many cases this process compared in that time, and what was wrong with some."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    until = time.monotonic() + seconds
    count = 0
    failures = []
    while time.monotonic() < until:
        if count % CASES_OF_A_FORM == 0:
            dtype = draw.choice(DTYPES)
            d = draw.choice(HEAD_SIZES)
            layouts = draw.choices(list(LAYOUTS), k=3)
            is_causal = draw.random() < 0.5
        n_queries, n_keys = (int(17 * 118 ** draw.random()) for _ in range(2))
        # Of so few numbers a sequence, many sequences.
        least = 1 + 512 // min(n_queries, n_keys)
        most = min(150, LARGEST // (n_queries * n_keys))
        heads = draw.randint(least, max(least, most))
        name = f"{count} of seed {seed}: {heads} heads, {n_queries} by {n_keys}, {d}, {', '.join(layouts)}"
        case = AttentionCase(name, (heads,), n_queries, n_keys, d, is_causal)

        def ours(*inputs, layouts=layouts):
            *tensors, causal = inputs
            laid_out = [LAYOUTS[name](x) for name, x in zip(layouts, tensors, strict=True)]
            return FlashAttentionTriton.apply(*laid_out, causal)

        try:
            check_attention(ours, cases=[case], dtype=dtype, seed=draw.getrandbits(32))
        except AssertionError as error:
            failures.append(f"{dtype}: {error}")
        count += 1
        # The other processes need some, too.
        if torch.cuda.memory_reserved() > 2**31:
            torch.cuda.empty_cache()
    return count, failures


if __name__ == "__main__":
    sys.exit(main())
