"""The arithmetic that is measured, by name, and the torch.dtype of its tensors."""

import torch

from cs336_systems.arguments import check_choice

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,  # float32 in memory: only matmuls round it
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of the tensors that our own kernels take.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of the tensors of one of DTYPES; its `itemsize` is bytes per element.

    Raises:
        ValueError: the name is unknown; the message lists those that are known.
    """
    check_choice("dtype", name, DTYPES)
    return DTYPES[name]
