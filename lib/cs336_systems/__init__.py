"""The library behind the workbook: a Transformer, its attention kernels, and the tools that measure them."""

import os

import torch

# Without a CUDA GPU, Triton kernels run in Triton's interpreter. Triton reads this when it is first imported
# (torch.compile and the optimizers import it too), so it is decided here, before anything else can.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
