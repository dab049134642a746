"""The fused kernels beside the same of PyTorch's operations, and shapes to try."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from cs336_systems.checks.accuracy import Reference, Trial, compare, random_on
from cs336_systems.functional import at_least_float32, rotary
from cs336_systems.training.linear_cross_entropy import IGNORED


@dataclass(frozen=True)
class Operation:
    """What a kernel is tried with.

    plain: the same of PyTorch's operations. tensors: names of its inputs; of a capital ones without gradient.
    make: shape and generator -> the inputs. shapes: to check.
    """

    plain: Callable
    tensors: tuple[str, ...]
    make: Callable
    shapes: tuple[tuple[int, ...], ...]

    def check(self, label, function, *, shapes=None, dtype=torch.float32):
        """A function and its gradients are near float64's, for fresh random inputs."""
        generator = random_on(None, 0)
        for shape in shapes or self.shapes:
            with generator.device:
                made = self.make(shape, generator)
            inputs = dict(zip(self.tensors, made, strict=True))
            for name, x in inputs.items():
                if name.islower():
                    inputs[name] = x.to(dtype).requires_grad_()
            output = self.plain(*inputs.values()).detach()
            noise = torch.randn(output.shape, generator=generator, device=output.device)
            trial = Trial(inputs, noise.to(output.dtype), where=f"{label} {shape}")
            list(compare(function, trial, Reference(self.plain)))


def _plain_rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, eps=1e-5)


def _rms_norm_inputs(shape, generator):
    return [torch.randn(size, generator=generator) for size in (shape, shape[-1:])]


def _plain_linear_cross_entropy(hidden, weight, targets):
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    logits = at_least_float32(hidden @ weight.T)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _plain_rotary(x, cos, sin):
    length = x.shape[-2]
    return rotary(x, cos[:length], sin[:length])


def _rotary_inputs(shape, generator):
    *_, positions, d = shape
    angles = 1000 * torch.rand(positions + 3, d // 2, generator=generator, dtype=torch.float32)
    return [torch.randn(shape, generator=generator), angles.cos(), angles.sin()]


def _swiglu_inputs(shape, generator):
    return [2 * torch.randn(shape, generator=generator) for _ in range(2)]


def _loss_inputs(shape, generator):
    """shape: of the hidden states, and the size of the vocabulary."""
    *leading, d, vocabulary = shape
    hidden = torch.randn(*leading, d, generator=generator)
    weight = torch.randn(vocabulary, d, generator=generator)
    targets = torch.randint(vocabulary, leading, generator=generator)
    ignored = torch.rand(leading, generator=generator) < 0.2
    # One at least counts.
    ignored.view(-1)[:1] = False
    return [hidden, weight * 2 / d**0.5, targets.masked_fill(ignored, IGNORED)]


FUSED = {
    "rms_norm": Operation(
        _plain_rms_norm,
        ("x", "weight"),
        _rms_norm_inputs,
        ((64, 128), (37, 100), (2, 3, 5, 33), (1, 1500), (300, 40), (7,)),
    ),
    "rotary": Operation(
        _plain_rotary,
        ("x", "Cos", "Sin"),
        _rotary_inputs,
        ((2, 3, 40, 64), (2, 37, 20), (1, 2), (70, 128), (2, 1, 2, 9, 6)),
    ),
    "swiglu": Operation(
        lambda a, b: F.silu(a) * b,
        ("a", "b"),
        _swiglu_inputs,
        ((64, 128), (37, 101), (2, 3, 5, 33), (1, 4999), (7,)),
    ),
    "linear_cross_entropy": Operation(
        _plain_linear_cross_entropy,
        ("hidden", "weight", "Targets"),
        _loss_inputs,
        # Of a single token a few probabilities decide, and so chance, who is how far off.
        ((2, 33, 64, 300), (30, 20, 1000), (50, 17, 37)),
    ),
}
