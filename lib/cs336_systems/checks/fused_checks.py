"""What "correct" means for a weighted sum and for the fused kernels of a training step: ours, or yours.

    from cs336_systems.checks import check_fused, check_weighted_sum
    check_fused("rms_norm", my_rms_norm)
    check_weighted_sum(my_weighted_sum)

The reference is the same of PyTorch's own operations, see `accuracy`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.arguments import check_choice
from cs336_systems.checks.accuracy import compare, random_on
from cs336_systems.functional import at_least_float32, rotary
from cs336_systems.training.linear_cross_entropy import IGNORED


@dataclass(frozen=True)
class Fused:
    """What a fused kernel is tried with.

    plain: the same of PyTorch's operations. tensors: names of its inputs; of a capital ones without gradient.
    make: shape and generator -> the inputs. shapes: to check.
    """

    plain: Callable[..., Tensor]
    tensors: tuple[str, ...]
    make: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Random inputs on the generator's device, those with a gradient in the dtype."""
        with generator.device:
            made = zip(self.tensors, self.make(shape, generator), strict=True)
            return [x.to(dtype) if own.islower() else x for own, x in made]

    def check(
        self, label: str, function: Callable, shapes=None, dtype=torch.float32, device=None, seed=None, **how
    ) -> pd.DataFrame:
        """As `check_fused`; `label` is for messages, and `accuracy.compare` takes more."""
        generator, lines = random_on(device, seed), []
        for shape in shapes or self.shapes:
            inputs = dict(zip(self.tensors, self.inputs(shape, dtype, generator), strict=True))
            output = self.plain(*inputs.values())
            d_output = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
            for tensor, x in inputs.items():
                x.requires_grad_(tensor.islower())
            compared = compare(function, self.plain, inputs, d_output, where=f"{label} {shape}", **how)
            lines += [{"shape": str(shape)} | line for line in compared]
        return pd.DataFrame(lines)


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    return F.cross_entropy(at_least_float32(hidden @ weight.T).flatten(0, -2), targets.flatten())


def _rotary_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    angles = 1000 * torch.rand(shape[-2] + 3, shape[-1] // 2, generator=generator, dtype=torch.float32)
    return [torch.randn(shape, generator=generator), angles.cos(), angles.sin()]


def _loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """shape: of the hidden states, and the size of the vocabulary."""
    *leading, d, vocabulary = shape
    hidden, weight = (torch.randn(*n, d, generator=generator) for n in (leading, (vocabulary,)))
    targets = torch.randint(vocabulary, leading, generator=generator)
    ignored = torch.rand(leading, generator=generator) < 0.2
    ignored.view(-1)[:1] = False  # one at least counts
    return [hidden, weight * 2 / d**0.5, targets.masked_fill(ignored, IGNORED)]


def fused_kernel(name: str) -> Callable[..., Tensor]:
    """Ours, of FUSED. To import kernels needs Triton."""
    from cs336_systems.kernels.rms_norm import rms_norm
    from cs336_systems.kernels.rotary import rotary
    from cs336_systems.kernels.swiglu import swiglu
    from cs336_systems.training.linear_cross_entropy import linear_cross_entropy

    return {each.__name__: each for each in (rms_norm, rotary, swiglu, linear_cross_entropy)}[name]


FUSED: dict[str, Fused] = {
    "rms_norm": Fused(
        lambda x, weight: F.rms_norm(x, weight.shape, weight, eps=1e-5),
        ("x", "weight"),
        lambda shape, generator: [torch.randn(size, generator=generator) for size in (shape, shape[-1:])],
        ((64, 128), (37, 100), (2, 3, 5, 33), (1, 1500), (300, 40), (7,)),
    ),
    "rotary": Fused(
        lambda x, cos, sin: rotary(x, cos[: x.shape[-2]], sin[: x.shape[-2]]),
        ("x", "Cos", "Sin"),
        _rotary_inputs,
        ((2, 3, 40, 64), (2, 37, 20), (1, 2), (70, 128), (2, 1, 2, 9, 6)),
    ),
    "swiglu": Fused(
        lambda a, b: F.silu(a) * b,
        ("a", "b"),
        lambda shape, generator: [2 * torch.randn(shape, generator=generator) for _ in range(2)],
        ((64, 128), (37, 101), (2, 3, 5, 33), (1, 4999), (7,)),
    ),
    "linear_cross_entropy": Fused(
        _plain_linear_cross_entropy,
        ("hidden", "weight", "Targets"),
        _loss_inputs,
        # Of a single token a few probabilities decide, and so chance, who is how far off.
        ((2, 33, 64, 300), (30, 20, 1000), (50, 17, 37)),
    ),
}
# Odd sizes, a row, a column, and several leading dimensions.
_WEIGHTED_SUM = Fused(
    lambda x, w: (x * w).sum(-1),
    ("x", "w"),
    FUSED["rms_norm"].make,
    ((64, 128), (37, 100), (1, 1500), (300, 1), (2, 3, 5, 33), (7,)),
)


def check_fused(name: str, function: Callable[..., Tensor] | None = None, **how: Any) -> pd.DataFrame:
    """Compare a fused kernel of FUSED and its gradients with float64, on fresh random inputs.

    Args:
        function: yours, called as ours is; None is ours.
        how: its shapes, as of FUSED; the dtype of what has a gradient, float32; the device, None for the GPU
            when there is one; the seed of the inputs, None for new ones.

    Returns:
        One line a shape and tensor: its relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: see `accuracy.compare`.
        ValueError: the name is unknown.
    """
    check_choice("kernel", name, FUSED)
    return FUSED[name].check(name, function or fused_kernel(name), **how)


def check_weighted_sum(weighted_sum: Callable[[Tensor, Tensor], Tensor], **how: Any) -> pd.DataFrame:
    """As `check_fused`: weighted_sum(x, w) of x (..., d) and w (d,) returns (...)."""
    return _WEIGHTED_SUM.check("x", weighted_sum, by_magnitude=True, **how)
