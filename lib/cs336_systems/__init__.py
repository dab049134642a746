"""The library behind the workbook: a Transformer, its attention kernels, and the tools that measure them."""

import os

import torch

from cs336_systems import versions

if message := versions.too_old(versions.installed()):
    raise ImportError(message)

# Without a CUDA GPU, Triton kernels run in Triton's interpreter. Triton reads this when it is first imported
# (torch.compile and the optimizers import it too), so it is decided here, before anything else can.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# In a kernel a product that is added to something is rounded once, with it: a fused multiply-add, twice as
# fast, other in the last bits than eager PyTorch. Triton does so by default up to 3.9, which warns once
# that 3.10 will round the product too; the rows, and the tolerances of the checks, stand on fused ones.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
