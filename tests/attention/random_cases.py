"""Random cases of the Triton attention against float64, forward and backward, in parallel processes.

    python -m tests.attention.random_cases                      half a minute on every GPU there is
    python -m tests.attention.random_cases --seconds 120 --processes 32 --seed 7

Head sizes of 16 to 256 and odd ones, 2 to 2,000 queries and keys, three dtypes, causal or not, large scores,
strided, sliced and offset inputs, expanded gradients. Each is held to `accuracy`: at most twice as far from
float64 as PyTorch's own, or, where few keys are seen, as FlashAttention-2 in PyTorch. (Of a single key the
weight is 1, and dQ and dK are what rounding leaves: test_flash.py.) A process keeps a Form, what Triton
compiles for, over many cases: the rest varies. Only for GPUs: interpreted, it is too slow.
Exit code 1: a case is too far off, or there were none.
"""

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
from tests.layouts import LAYOUTS
from torch import Tensor

from cs336_systems.attention import FlashAttentionPyTorch, FlashAttentionTriton
from cs336_systems.attention.baselines import sdpa
from cs336_systems.attention.plain import plain_attention
from cs336_systems.checks.accuracy import EPS, Reference, Trial, compare, random_on

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZES = (16, 32, 33, 40, 64, 64, 80, 96, 128, 128, 256)
# Powers of two; None is for the number 1. Tiles have up to 128 rows.
BATCH_POWERS = (None, None, 0, 1, 2, 3)
HEADS_POWERS = (None, None, 0, 1, 3, 4)
LENGTH_POWERS = (0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7)
# What comes out has strides of the same kind as if its input were contiguous; but not of
COLUMNS_FIRST = ("columns first",)
ROWS_FIRST = tuple(name for name in LAYOUTS if name not in COLUMNS_FIRST)
# Of O's gradient, as a sum's is.
EXPANDED = {"nothing": (), "queries": (-2,), "queries and d": (-2, -1)}
CASES_OF_A_FORM = 100
LARGEST = 2**24  # scores of a case, or quarters of its keys' numbers: some gigabytes in float64


def main() -> int:
    prog = "python -m tests.attention.random_cases"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    # One for each core: they compile.
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--longest", type=int, default=2000, help="queries or keys")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        work = partial(run, options.seed, seconds=options.seconds, longest=options.longest)
        results = pool.map(work, range(options.processes))
    count = sum(of_process for of_process, _ in results)
    failures = [line for _, lines in results for line in lines]
    print(*failures, sep="\n")
    last_seed = options.seed + options.processes - 1
    print(f"{count:,} cases, {len(failures)} failed; seeds {options.seed} to {last_seed}")
    return bool(failures or not count)


def run(first_seed: int, process: int, seconds: float, longest: int) -> tuple[int, list[str]]:
    """How many cases this process compared in that time, and what was wrong with some."""
    torch.set_num_threads(1)
    seed = first_seed + process
    draw = random.Random(seed)
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda", process % torch.cuda.device_count())
        torch.cuda.set_device(device)
    generator = random_on(device, seed)
    until = time.monotonic() + seconds
    count = 0
    failures = []
    while time.monotonic() < until:
        if count % CASES_OF_A_FORM == 0:
            form = draw_form(draw)
        try:
            one_case(form, draw, generator, longest)
        except AssertionError as error:
            failures.append(f"seed {seed}: {form}: {error}")
        count += 1
        # The other processes need some, too.
        if torch.cuda.memory_reserved() > 2**31:
            torch.cuda.empty_cache()
    return count, failures


@dataclass(frozen=True)
class Form:
    """What is compiled for: Triton asks of every size and stride whether it is 1, or a multiple of 16.

    So each size is 1 or an odd number times a power of two, and all products of sizes answer alike.
    """

    dtype: torch.dtype
    d: int
    is_causal: bool
    batch: int | None  # the power of two, None for 1
    heads: int | None
    queries: int
    keys: int
    square: bool  # as many keys as queries
    layouts: list[tuple[str, ...]]  # of Q, K and V: a case has one of each


def draw_form(draw: random.Random) -> Form:
    dtype = draw.choice(DTYPES)
    d = draw.choice(HEAD_SIZES)
    is_causal = draw.random() < 0.5
    powers = (BATCH_POWERS, HEADS_POWERS, LENGTH_POWERS, LENGTH_POWERS)
    sizes = [draw.choice(choices) for choices in powers]
    square = draw.random() < 0.4
    layouts = draw.choices([COLUMNS_FIRST, ROWS_FIRST], [1, len(ROWS_FIRST)], k=3)
    return Form(dtype, d, is_causal, *sizes, square, layouts)


def draw_sizes(form: Form, draw: random.Random, longest: int) -> tuple[int, int, int, int]:
    """batch, heads, n_queries, n_keys."""

    def number(power: int | None, largest: int, least: float = 0) -> int:
        if power is None:
            return 1
        odd = int((largest / 2**power) ** draw.uniform(least, 1)) | 1
        return 2**power * (odd if power else max(odd, 3))

    while True:
        batch = number(form.batch, 8)
        heads = number(form.heads, 16)
        long = draw.random() < 0.3  # long loops: short ones have a backward of their own on Hopper
        n_queries = number(form.queries, longest, 0.9 if long else 0)
        n_keys = n_queries if form.square else number(form.keys, longest)
        # Of so few numbers a sequence, many sequences: chance must not decide who is how far off.
        batch *= 512 // (batch * heads * min(n_queries, n_keys)) | 1
        scores = n_queries * n_keys
        numbers = max(n_queries, n_keys) * form.d
        if batch * heads * max(scores, numbers // 4) <= LARGEST:
            return batch, heads, n_queries, n_keys


def one_case(form: Form, draw: random.Random, generator: torch.Generator, longest: int) -> None:
    batch, heads, n_queries, n_keys = draw_sizes(form, draw, longest)
    layouts = [draw.choice(names) for names in form.layouts]
    expanded = draw.choice(list(EXPANDED))
    dims = EXPANDED[expanded]
    # Of the scores' deviation: the largest is 4 times that.
    scale = draw.choice([1, 1, 1, 5, 30])
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def ours(*inputs: Tensor) -> Tensor:
        laid_out = [LAYOUTS[name](x) for name, x in zip(layouts, inputs, strict=True)]
        o = FlashAttentionTriton.apply(*laid_out, form.is_causal)
        if dims and o.requires_grad:
            o.register_hook(lambda d_o: d_o[one_of_each].expand_as(d_o))
        return o

    q, k, v = (normal(batch, heads, n, form.d) for n in (n_queries, n_keys, n_keys))
    inputs = {"Q": q * scale, "K": k, "V": v}
    inputs = {name: x.to(form.dtype).requires_grad_() for name, x in inputs.items()}
    one_of_each = tuple(slice(1) if dim in dims else slice(None) for dim in range(-4, 0))
    d_o = normal(*q.shape).to(form.dtype)[one_of_each].expand_as(q)
    where = f"({batch}, {heads}, {n_queries} by {n_keys}, {form.d}), scores times {scale}, Q, K, V "
    where += f"{', '.join(layouts)}, of dO expanded: {expanded}"

    # Of few keys, or where large scores choose one, dP - delta leaves FlashAttention-2's roundings.
    few = min(n_queries, n_keys) <= 16 or scale > 1
    yardstick = sdpa if device.type == "cuda" else plain_attention
    if few:
        yardstick = FlashAttentionPyTorch.apply
    formula = partial(plain_attention, is_causal=form.is_causal)
    rounding = max(2, scale / 2) * EPS

    def torchs_own(*inputs: Tensor) -> Tensor:
        return yardstick(*inputs, form.is_causal)

    reference = Reference(formula, torchs_own=torchs_own, rounding=rounding)
    # It compares as it is iterated over, and raises.
    list(compare(ours, Trial(inputs, d_o, where), reference))


if __name__ == "__main__":
    sys.exit(main())
