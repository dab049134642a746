#!/bin/sh
# What surprises: for each checkpointed segment torch.profiler has one operator too many, as a rule the last matmul: it
# is never computed, and still has a call and FLOPs.
#   Package   torch 2.13.0 (with numpy 2.3.5), from the Python package index; the counts are the same with 2.15.0
#   Source    torch/utils/checkpoint.py, 1131: the second forward ends, by an exception, as soon as the last tensor
#             that backward needs is saved. An operator saves its inputs before it computes; the profiler's record of
#             it, whose FLOPs follow from its shapes, is open by then
#   Expected  the calls and FLOPs of what ran, as torch.utils.flop_counter.FlopCounterMode has them
#   Happens   a checkpointed MLP of two equal matmuls computes 7: 2 forward, 1 again, 4 backward. The profiler has 8:
#             FLOP/s come out 14 % too high. Without the early stop 8 are computed, and both say so
#   What to do  count FLOPs with FlopCounterMode or by a closed form; in a trace leave out the operator with which a
#             second forward ends (here it takes 0.1 ms, each other 3 ms)
#   Output seen (Python 3.11.7)
#     early stop: FlopCounterMode 7 matmuls, profiler's FLOPs 8, profiler's calls 8
#     all again: FlopCounterMode 8 matmuls, profiler's FLOPs 8, profiler's calls 8
#     no checkpoint: FlopCounterMode 6 matmuls, profiler's FLOPs 6, profiler's calls 6
# Fails if that changes. Needs a network, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat >"$work/count.py" <<'PY'
from functools import partial

import torch
from torch.nn import GELU, Linear, Sequential
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

ROWS, WIDTH, HIDDEN = 512, 256, 1024
ONE_MATMUL = 2 * ROWS * WIDTH * HIDDEN
mlp = Sequential(Linear(WIDTH, HIDDEN, bias=False), GELU(), Linear(HIDDEN, WIDTH, bias=False))
x = torch.randn(ROWS, WIDTH, requires_grad=True)


def counts(forward):
    """Matmuls by their FLOPs as the counter and the profiler have them, and the profiler's calls."""

    def step():
        forward(x).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        step()
    (matmul,) = [row for row in profiler.key_averages() if row.key == "aten::mm"]
    return counter.get_total_flops() / ONE_MATMUL, matmul.flops / ONE_MATMUL, matmul.count


checkpointed = partial(checkpoint, mlp, use_reentrant=False)
plans = {
    "early stop": (checkpointed, (7, 8, 8)),
    "all again": (partial(checkpointed, early_stop=False), (8, 8, 8)),
    "no checkpoint": (mlp, (6, 6, 6)),
}
for name, (forward, expected) in plans.items():
    seen = counts(forward)
    print("{}: FlopCounterMode {:g} matmuls, profiler's FLOPs {:g}, profiler's calls {}".format(name, *seen))
    assert seen == expected
PY
"$work/venv/bin/python" "$work/count.py"
