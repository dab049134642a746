"""The library behind the workbook: a Transformer, its attention kernels, and the tools that measure them."""

import gc
import os
from importlib.util import find_spec

import torch

from cs336_systems import versions

if message := versions.too_old(versions.installed()):
    raise ImportError(message)

# What torch has brought stays: each collection would walk all of it, in every rank.
gc.freeze()
# Without a CUDA GPU, Triton kernels run in Triton's interpreter. Triton reads this when it is first imported
# (torch.compile and the optimizers import it too), so it is decided here, before anything else can.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# In a kernel a product that is added to something is rounded once, with it: a fused multiply-add, twice as
# fast, other in the last bits than eager PyTorch. Triton does so by default up to 3.9, which warns once
# that 3.10 will round the product too; the rows, and the tolerances of the checks, stand on fused ones.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Once Inductor compiles, it makes all of Triton use torch's own ptxas, where torch has one: the assembler of
# our kernels, and with it which of them can run, would hang on what was compiled before. What is set stays.
if triton := find_spec("triton"):
    os.environ.setdefault(
        "TRITON_PTXAS_PATH", f"{triton.submodule_search_locations[0]}/backends/nvidia/bin/ptxas"
    )
