"""Random cases of the Triton attention against float64, forward and backward, in parallel processes.

    python -m tests.attention.random_cases                      half a minute on every GPU there is
    python -m tests.attention.random_cases --seconds 120 --processes 32 --seed 7

Head sizes of 16 to 256 and odd ones, 1 to 2,000 queries and keys, three dtypes, causal or not, large scores,
strided, sliced and offset inputs, expanded gradients. Each is held to `accuracy`: at most twice as far from
float64 as PyTorch's own, or, where few keys are seen, as FlashAttention-2 in PyTorch. Where one key is seen
its weight is 1, whatever the score: dQ and dK are zero, and held to roundings of the terms that cancel. A
process keeps a dtype, head size and layout for some cases: each compiles anew. Only for GPUs: the interpreter
is too slow.
Exit code 1: a case is too far off, or there were none.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass

import torch
from tests.layouts import LAYOUTS
from torch import Tensor

from cs336_systems.attention import FlashAttentionPyTorch, FlashAttentionTriton
from cs336_systems.attention.baselines import sdpa
from cs336_systems.attention.plain import plain_attention
from cs336_systems.checks.accuracy import EPS, compare, random_on

HEAD_SIZES = (16, 32, 33, 40, 64, 64, 80, 96, 128, 128, 256)
EXPANDED = {"nothing": (), "queries": (-2,), "queries and d": (-2, -1)}  # of O's gradient, as a sum's is
CASES_OF_A_FORM = 60
LARGEST = 2**24  # scores of a case, or quarters of its keys' numbers: some gigabytes in float64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attention.random_cases", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--longest", type=int, default=2000, help="queries or keys")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        jobs = [(options.seed + i, i, options.seconds, options.longest) for i in range(options.processes)]
        counted, failed = zip(*pool.starmap(run, jobs), strict=True)
    failures = [line for lines in failed for line in lines]
    print(*failures, sep="\n")
    print(f"{sum(counted):,} cases, {len(failures)} failed; seeds {options.seed} to {jobs[-1][0]}")
    return bool(failures or not sum(counted))


def run(seed: int, place: int, seconds: float, longest: int) -> tuple[int, list[str]]:
    """How many cases were compared in that time, and what was wrong with some."""
    torch.set_num_threads(1)
    draw, device = random.Random(seed), "cpu"
    if torch.cuda.is_available():
        device = torch.device("cuda", place % torch.cuda.device_count())
        torch.cuda.set_device(device)
    generator, until, count, failures = random_on(device, seed), time.monotonic() + seconds, 0, []
    while time.monotonic() < until:
        if count % CASES_OF_A_FORM == 0:
            form = Form(
                draw.choice([torch.bfloat16, torch.float16, torch.float32]),
                draw.choice(HEAD_SIZES),
                draw.random() < 0.5,
                draw.choices(list(LAYOUTS), k=3),
                draw.choice(list(EXPANDED)),
            )
        try:
            one_case(form, draw, generator, longest)
        except AssertionError as error:
            failures.append(f"seed {seed}: {form}: {error}")
        count += 1
        torch.cuda.empty_cache()  # which the other processes need
    return count, failures


@dataclass(frozen=True)
class Form:
    """What is compiled for."""

    dtype: torch.dtype
    d: int
    is_causal: bool
    layouts: list[str]
    expanded: str


def one_case(form: Form, draw: random.Random, generator: torch.Generator, longest: int) -> None:
    n_queries, n_keys = (int(longest ** draw.random()) for _ in range(2))
    if draw.random() < 0.3:  # long loops: short ones have a backward of their own on Hopper
        n_queries = draw.randint(longest // 2, longest)
    n_keys = n_queries if draw.random() < 0.4 else n_keys
    batch, heads = draw.choice([(1, 1), (2, 3), (1, 16), (5, 8), (3, 1), (8, 16)])
    # Of so few numbers a sequence, many sequences: chance must not decide who is how far off.
    batch *= max(1, 512 // (heads * min(n_queries, n_keys)))
    most = LARGEST // max(n_queries * n_keys, max(n_queries, n_keys) * form.d // 4)
    heads = min(heads, most)
    batch = min(batch, most // heads)
    scale = draw.choice([1, 1, 1, 5, 30])  # of the scores' deviation: the largest is 4 times that
    device, expanded = generator.device, EXPANDED[form.expanded]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def ours(*inputs: Tensor) -> Tensor:
        laid_out = [LAYOUTS[name](x) for name, x in zip(form.layouts, inputs, strict=True)]
        o = FlashAttentionTriton.apply(*laid_out, form.is_causal)
        if expanded and o.requires_grad:
            o.register_hook(lambda d_o: d_o[one_of_each].expand_as(d_o))
        return o

    q, k, v = (normal(batch, heads, n, form.d) for n in (n_queries, n_keys, n_keys))
    inputs = {"Q": q * scale, "K": k, "V": v}
    inputs = {name: x.to(form.dtype).requires_grad_() for name, x in inputs.items()}
    one_of_each = tuple(slice(1) if dim in expanded else slice(None) for dim in range(-4, 0))
    d_o = normal(*q.shape).to(form.dtype)[one_of_each].expand_as(q)
    where = f"({batch}, {heads}, {n_queries} by {n_keys}, {form.d}), scores times {scale}"

    if n_keys == 1 or (form.is_causal and n_queries == 1):
        d_q, d_k = torch.autograd.grad(ours(*inputs.values()), (inputs["Q"], inputs["K"]), d_o)
        check_zero_gradients(inputs, d_o, d_q, d_k, where)
        inputs["Q"].requires_grad_(False)
        inputs["K"].requires_grad_(False)

    # Of few keys, or where large scores choose one, dP - delta leaves FlashAttention-2's roundings.
    few = min(n_queries, n_keys) <= 16 or scale > 1
    own = FlashAttentionPyTorch.apply if few else sdpa if device.type == "cuda" else plain_attention
    compared = compare(
        ours,
        lambda q, k, v: plain_attention(q, k, v, form.is_causal),
        inputs,
        d_o,
        where=where,
        torchs_own=lambda q, k, v: own(q, k, v, form.is_causal),
        rounding=max(2, scale / 2) * EPS,
    )
    for _ in compared:
        pass


def check_zero_gradients(
    inputs: dict[str, Tensor], d_o: Tensor, d_q: Tensor, d_k: Tensor, where: str
) -> None:
    """dQ and dK where only the first key is seen: dS = P (dP - delta) is a rounding of dP's terms or less."""
    q, k, v = (x.detach().double().abs() for x in inputs.values())
    d_s = q.shape[-1] ** -0.5 * d_o.double().abs() @ v[..., :1, :].mT
    assert not d_k[..., 1:, :].any(), f"dK of {where}: keys that no query sees have a gradient"
    for name, gradient, terms in (("dQ", d_q, d_s @ k[..., :1, :]), ("dK", d_k[..., :1, :], d_s.mT @ q)):
        error = (gradient.double().norm() / terms.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
        assert error <= 2 * EPS, (
            f"{name} of {where} is zero; {error:.2g} of its terms found, allowed {2 * EPS:.2g}"
        )


if __name__ == "__main__":
    sys.exit(main())
