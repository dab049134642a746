#!/bin/sh
# What surprises: over Gloo the maximum of numbers among which is a NaN depends on the rank that has it, and may be
# neither NaN nor the largest of the others. So DTensor.max() is not max(), and a check of gradients may pass a NaN.
#   Package   torch 2.13.0 (with numpy 2.3.5), from the Python package index; the numbers are the same with 2.15.0
#   Source    gloo/math.h, max and min: std::max and std::min of two ranks' numbers, again and again, which keep the
#             first where a comparison is false, as each with a NaN is: either the NaN is lost, or the other number.
#             torch/distributed/tensor/_ops/_math_ops.py, 339 and 591, reduces maxima and infinity norms so
#   Expected  NaN, as from max() of the whole tensor and from DTensor.sum(); or 7, the largest of the others
#   Happens   x = 0 to 7 on four ranks, one number a NaN: NaN, 1, 3 or 5, by its rank, and all ranks agree. Where
#             FSDP2's gradients have a NaN on one of the last three, clip_grad_norm_(norm_type=inf,
#             error_if_nonfinite=True) returns the others' norm and raises nothing
#   What to do  add up isnan() over the ranks, or use the norm of order 2: a sum keeps a NaN
#   Output seen (Python 3.11.7)
#     NaN on rank 0: max() nan, DTensor.max() nan, DTensor.sum() nan; gradients clipped: it raises
#     NaN on rank 1: max() nan, DTensor.max() 1.0, DTensor.sum() nan; gradients clipped: their norm is 2.0
#     NaN on rank 2: max() nan, DTensor.max() 3.0, DTensor.sum() nan; gradients clipped: their norm is 2.0
#     NaN on rank 3: max() nan, DTensor.max() 5.0, DTensor.sum() nan; gradients clipped: their norm is 2.0
# Fails if that changes. Needs a network, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat >"$work/maximum.py" <<'PY'
from math import inf, isnan, nan

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4


def clipped(rank, owner, mesh):
    """What clipping says of gradients that are all 2, but for a NaN on one rank."""
    layer = fully_shard(torch.nn.Linear(4, 8, bias=False), mesh=mesh)
    layer(torch.ones(2, 4)).sum().backward()
    if rank == owner:
        layer.weight.grad.to_local()[0, 0] = nan
    try:
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, norm_type=inf, error_if_nonfinite=True)
    except RuntimeError:
        return "it raises"
    return f"their norm is {norm.full_tensor().item()}"


def worker(rank):
    store = dist.FileStore("rendezvous", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for owner in range(RANKS):
        x = torch.arange(8.0)
        x[2 * owner] = nan
        sharded = distribute_tensor(x, mesh, [Shard(0)])
        whole = x.max().item()
        maximum, total = (result.full_tensor().item() for result in (sharded.max(), sharded.sum()))
        says = clipped(rank, owner, mesh)
        if rank == 0:
            print(
                f"NaN on rank {owner}: max() {whole}, DTensor.max() {maximum}, DTensor.sum() {total};"
                f" gradients clipped: {says}",
                flush=True,
            )
        assert isnan(whole)
        assert isnan(total)
        assert isnan(maximum) if owner == 0 else maximum == 2 * owner - 1
        assert says == ("it raises" if owner == 0 else "their norm is 2.0")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=RANKS)
PY
cd "$work"
OMP_NUM_THREADS=1 venv/bin/python maximum.py
