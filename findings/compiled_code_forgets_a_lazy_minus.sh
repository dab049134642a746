#!/bin/sh
# What surprises: a tensor may carry its minus sign as a bit (`z.conj().imag` does), which every eager operation
# honours. Code from torch.compile reads its memory as it is: the result has the other sign, without a warning.
#   Package   torch 2.13.0 (with numpy 2.3.5), from the Python package index; elementwise code is the same with 2.15.0
#   Source    torch/_inductor: loads go by pointer, past the dispatch key that negates; PyTorch's issue 145093
#   Expected  compiled and eager agree, or compiling refuses the tensor
#   Happens   elementwise code and a softmax are wrong; a matmul alone, left to ATen, is right
#   What to do  x.resolve_neg() before compiled code and before kernels launched by pointer; x.is_neg() tells
#   Output seen (Python 3.11.7)
#     the bit is set: True
#     x * 2 + 1: eager 5.0, compiled -3.0
#     softmax: eager and compiled are 0.905 apart
#     x @ x.T: eager and compiled are 0.0 apart
#     with resolve_neg(): eager 5.0, compiled 5.0
# Fails if that changes. Needs a network and a C++ compiler, no GPU; leaves nothing.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cat >"$work/minus.py" <<'PY'
import torch


def affine(x):
    return x * 2 + 1


def softmax(x):
    return x.softmax(-1)


def gram(x):
    return x @ x.T


x = torch.tensor([[1 - 2j, 3 + 1j], [0 - 1j, 2 - 4j]]).conj().imag
print("the bit is set:", x.is_neg())
assert x.is_neg()
eager, compiled = affine(x)[0, 0].item(), torch.compile(affine)(x)[0, 0].item()
print(f"x * 2 + 1: eager {eager}, compiled {compiled}")
assert (eager, compiled) == (5.0, -3.0)
apart = {}
for function in (softmax, gram):
    apart[function] = (function(x) - torch.compile(function)(x)).abs().max().item()
print(f"softmax: eager and compiled are {apart[softmax]:.3g} apart")
print(f"x @ x.T: eager and compiled are {apart[gram]} apart")
assert apart[softmax] > 0.9 and apart[gram] == 0
resolved = torch.compile(affine)(x.resolve_neg())[0, 0].item()
print(f"with resolve_neg(): eager {eager}, compiled {resolved}")
assert resolved == eager
PY
cd "$work"
TORCHINDUCTOR_CACHE_DIR="$work/cache" venv/bin/python minus.py
