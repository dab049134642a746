"""The same input again and again, in every form that attention's kernels have on Hopper: races would show.

    python -m tests.attention.races                                        a hundred times each
    compute-sanitizer --tool memcheck python -m tests.attention.races --times 1
    compute-sanitizer --tool racecheck python -m tests.attention.races --times 1

Sizes are small: the sanitizer takes long. Its racecheck does not know mbarriers, so in the forward it names
what is no race: the next item's store and load, and Triton's hand-over to warps with roles.
Exit code 1: results differ, or another kernel ran than CASES says.
"""

import argparse
import sys

import torch

from cs336_systems.attention.config import KernelConfig
from cs336_systems.attention.flash_triton import flash_backward, flash_forward
from cs336_systems.attention.launcher import (
    HopperForward,
    backward_launcher,
    config_for,
    forward_launcher,
)

Case = tuple[int, int, int, int, str, bool]
# (heads, queries, keys, d, dtype, causal): what runs it on a Hopper GPU of 132 SMs.
CASES: dict[Case, str] = {
    (180, 250, 250, 64, "bfloat16", True): "HopperForward 64x64 persistent, Backward",
    (120, 250, 250, 128, "bfloat16", True): "HopperForward 64x64 persistent, Backward",
    (60, 768, 1152, 64, "bfloat16", False): "HopperForward 192x128 persistent, HopperBackward",
    (60, 768, 1100, 64, "bfloat16", False): "HopperForward 192x128, HopperBackward",
    (60, 520, 640, 128, "bfloat16", False): "HopperForward 128x128 persistent, HopperBackward",
    (40, 1030, 400, 128, "float16", True): "HopperForward 64x64 persistent, HopperBackward",
    (45, 1030, 400, 16, "float16", True): "HopperForward 64x64 persistent, HopperBackward",
    (40, 200, 200, 64, "bfloat16", False): "HopperForward 64x128, Backward",
    (2, 300, 300, 128, "bfloat16", True): "HopperForward 64x128, OneLaunchBackward",
    (12, 520, 530, 128, "float32", True): "PlanesForward, PlanesBackward",
    (12, 520, 530, 64, "float32", False): "PlanesForward, PlanesBackward",
    (2, 1100, 1100, 64, "float32", True): "PlanesForward, PlanesBackward",  # in parts
    (2, 300, 300, 64, "float32", True): "Forward, OneLaunchBackward",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attention.races", description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("the cases are for a Hopper GPU, and torch sees none here")
    wrong = 0
    for case, wanted in CASES.items():
        launchers = launchers_of(case, config_for(getattr(torch, case[4]), case[3], torch.device("cuda")))
        differing = what_differs(case, options.times)
        print(case, launchers, differing or "the same every time", sep=": ", flush=True)
        wrong += launchers != wanted or bool(differing)
    return bool(wrong)


def launchers_of(case: Case, config: KernelConfig) -> str:
    """As CASES writes it."""
    heads, n_queries, n_keys, d, _, is_causal = case
    q, k = (((heads, n, d), (n * d, d, 1)) for n in (n_queries, n_keys))
    forward = forward_launcher((q, k, k, q), config, is_causal)
    backward = backward_launcher((q, k, k, q, q, q, k, k), config, is_causal, deterministic=False)
    name = type(forward).__name__
    if isinstance(forward, HopperForward):
        tile = forward.tile("hopper_forward")
        name += f" {tile.block_m}x{tile.block_n}" + " persistent" * forward.persistent
    return f"{name}, {type(backward).__name__}"


def what_differs(case: Case, times: int) -> list[str]:
    """The outputs that are not the same every time; dQ up to a rounding: programs add to it as they come."""
    heads, n_queries, n_keys, d, dtype, is_causal = case
    shapes = [(heads, n, d) for n in (n_queries, n_keys, n_keys, n_queries)]
    q, k, v, do = (torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes)
    first, differing = {}, set()
    for _ in range(times):
        o, logsumexp, *rest = flash_forward(q, k, v, is_causal)
        dq, dk, dv = flash_backward(do, q, k, v, o, logsumexp, is_causal, *rest)
        found = {"O": o, "L": logsumexp, "dK": dk, "dV": dv, "dQ": dq}
        first = first or found
        differing |= {name for name in first if name != "dQ" and not torch.equal(found[name], first[name])}
        little = 1e-5 * first["dQ"].nan_to_num().abs().max().item()
        if not torch.allclose(dq, first["dQ"], rtol=2**-7, atol=little):
            differing.add("dQ")
    torch.cuda.synchronize()
    return sorted(differing)


if __name__ == "__main__":
    sys.exit(main())
