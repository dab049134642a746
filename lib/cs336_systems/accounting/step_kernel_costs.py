"""Lower bounds for the fused kernels of a training step: bytes moved, FLOPs, and so the time.

A kernel reads every input and writes every output once, whoever wrote it.
"""

import math
from typing import NamedTuple

from cs336_systems.accounting.data_sheets import Hardware, hardware, hardware_names
from cs336_systems.accounting.flops import roofline_seconds
from cs336_systems.configs import ModelConfig

# Tensors as large as its output that a kernel reads or writes: in forward, and in forward and backward.
MOVED = {"rms_norm": (2, 5), "rotary": (2, 4), "swiglu": (3, 8)}


class Work(NamedTuple):
    """flops are those of matmuls."""

    moved_bytes: int
    flops: int

    def seconds(self, chip: Hardware) -> float:
        """The least time for 16-bit numbers: memory or tensor cores at the peak of the data sheet."""
        peaks = chip.flops_per_s / 1e12, chip.memory_bytes_per_s / 1e9
        return roofline_seconds(self.flops, self.moved_bytes, *peaks)


def kernel_shape(kernel: str, config: ModelConfig, tokens: int) -> tuple[int, ...]:
    """The tensor that a kernel works on; of the loss (tokens, d_model, vocab_size)."""
    return {
        "rms_norm": (tokens, config.d_model),
        "rotary": (1, config.num_heads, tokens, config.d_head),
        "swiglu": (tokens, config.d_ff),
        "linear_cross_entropy": (tokens, config.d_model, config.vocab_size),
    }[kernel]


def least_work(kernel: str, shape: tuple[int, ...], element_bytes: int, *, backward: bool) -> Work:
    """That of forward alone, or of forward and backward."""
    if kernel in MOVED:
        return Work(MOVED[kernel][backward] * math.prod(shape) * element_bytes, 0)
    tokens, d_model, vocabulary = shape
    tensors = 2 if backward else 1  # hidden states and weight; in backward their gradients too
    moved = tensors * (tokens + vocabulary) * d_model * element_bytes
    return Work(moved, (6 if backward else 2) * math.prod(shape))


def chip_of(gpu: str) -> Hardware | None:
    """The data sheet for a GPU by the name that the driver gives it; None where it is of another kind."""
    names = (name for name in hardware_names() if name.split()[0] in gpu.split() and "PCIe" not in gpu)
    return next(map(hardware, names), None)
