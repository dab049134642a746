#!/bin/sh
# What surprises: torch.utils.flop_counter.FlopCounterMode, with which utilisation and closed forms are checked, has 0 for
# work that it could count: attention as PyTorch does it on a CPU, and a matrix times a vector.
#   Package   torch 2.13.0 (with numpy 2.3.5), from the Python package index. 2.15.0 counts attention, and no vectors still
#   Source    torch/utils/flop_counter.py: an operator without an entry in `flop_registry` counts as none. There are entries
#             for fused attention of GPUs, not for `_scaled_dot_product_flash_attention_for_cpu`; for mm, not for mv and
#             dot. PyTorch's issue 195460 is about the first
#   Expected  the same function has the same count whatever computes it, or a warning that an operator is not known
#   Happens   attention, forward and backward, has its count with the plain backend and 0 with the one that is chosen
#             by itself; `a @ x` has 0, `a @ x[:, None]`, which is as much work, 2 n^2
#   What to do  register a formula (torch.utils.flop_counter.register_flop_formula), or compare with a closed form once
#   Output seen (Python 3.11.7)
#     attention, MATH: forward 134217728, backward 268435456
#     attention, chosen by itself: forward 0, backward 0
#     a @ x: 0
#     a @ x[:, None]: 524288
#     x @ x: 0
# Fails if that changes. Needs a network, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat >"$work/count.py" <<'PY'
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode


def flops(step):
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def of_attention(backend):
    q, k, v = (torch.randn(2, 4, 256, 64, requires_grad=True) for _ in range(3))
    outputs = []
    with backend:
        forward = flops(lambda: outputs.append(scaled_dot_product_attention(q, k, v)))
        return forward, flops(lambda: outputs[0].sum().backward())


matmuls = 2 * (2 * 2 * 4 * 256 * 256 * 64)
plain = of_attention(sdpa_kernel(SDPBackend.MATH))
chosen = of_attention(nullcontext())
print(f"attention, MATH: forward {plain[0]}, backward {plain[1]}")
print(f"attention, chosen by itself: forward {chosen[0]}, backward {chosen[1]}")
assert plain == (matmuls, 2 * matmuls) and chosen == (0, 0)
a, x = torch.randn(512, 512), torch.randn(512)
counts = {"a @ x": flops(lambda: a @ x), "a @ x[:, None]": flops(lambda: a @ x[:, None]), "x @ x": flops(lambda: x @ x)}
for name, count in counts.items():
    print(f"{name}: {count}")
assert list(counts.values()) == [0, 2 * 512 * 512, 0]
PY
"$work/venv/bin/python" "$work/count.py"
