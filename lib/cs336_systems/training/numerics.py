"""What low precision does to numbers: running sums, dtypes under autocast, LayerNorm rounded throughout."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Accumulation:
    """How one running sum is kept: `total += addend`, each in its own dtype."""

    name: str
    accumulator: torch.dtype
    addend: torch.dtype
    explicit_cast: bool = False


# The handout's four variants, in its order.
ACCUMULATIONS = (
    Accumulation("float32 += float32", torch.float32, torch.float32),
    Accumulation("float16 += float16", torch.float16, torch.float16),
    Accumulation("float32 += float16", torch.float32, torch.float16),
    Accumulation("float32 += float16 cast to float32", torch.float32, torch.float16, explicit_cast=True),
)


def running_sum(how: Accumulation, value: float, count: int) -> torch.Tensor:
    """Add `value` `count` times: the partial sums from 0 on, (count + 1,), exactly, in float64."""
    total = torch.tensor(0.0, dtype=how.accumulator)
    partial_sums = [total.item()]
    for _ in range(count):
        addend = torch.tensor(value, dtype=how.addend)
        total += addend.to(how.accumulator) if how.explicit_cast else addend
        partial_sums.append(total.item())
    return torch.tensor(partial_sums, dtype=torch.float64)


def spacing(x: float, dtype: torch.dtype) -> float:
    """Distance from |x| to the next larger number that `dtype` can hold (one unit in the last place)."""
    at = torch.tensor(abs(x), dtype=dtype)
    return (torch.nextafter(at, torch.tensor(torch.inf, dtype=dtype)).double() - at.double()).item()


def rounded_increment(value: float, total: float, dtype: torch.dtype) -> float:
    """What adding `value` to `total` really adds, when the sum is rounded to `dtype`."""
    exact = torch.tensor(total, dtype=torch.float64) + torch.tensor(value, dtype=dtype).double()
    return exact.to(dtype).double().item() - total


def binades(value: float, count: int, dtype: torch.dtype) -> list[dict[str, float]]:
    """Predict `running_sum` in one dtype without adding: one row for each binade [2^e, 2^(e+1)) of the total.

    Inside a binade the spacing is constant and the total is a multiple of it, so every addition is rounded
    the same way: the sum climbs by one fixed increment (but for exact ties, which round to even in turns).
    `total` is where it enters the binade, `additions` are made there; the last `end` is the sum.
    """
    total = rounded_increment(value, 0.0, dtype)
    left, rows = count - 1, []
    while left > 0:
        increment = rounded_increment(value, total, dtype)
        top = 2.0 ** (math.floor(math.log2(total)) + 1)
        additions = left if increment == 0 else min(left, math.ceil((top - total) / increment))
        # The addition that leaves the binade is rounded to the spacing of the next one.
        before = total + max(additions - 1, 0) * increment
        end = before + rounded_increment(value, before, dtype)
        row = {"total": total, "spacing": spacing(total, dtype), "increment": increment}
        rows.append(row | {"additions": additions, "end": end})
        total = end
        left -= additions
    return rows


class ToyModel(nn.Module):
    """The handout's model for looking at dtypes: linear to 10 without bias, ReLU, LayerNorm, linear."""

    def __init__(self, d_in: int = 20, d_out: int = 5):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.ln(self.fc1(x).relu()))


def autocast_dtypes(dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.dtype]:
    """Run `ToyModel` forward and backward under autocast and note the dtype that each tensor really has."""
    model = ToyModel().to(device)
    seen = {"parameters": next(model.parameters()).dtype}
    names = {model.fc1: "output of the first linear layer", model.ln: "output of LayerNorm"}
    for module, name in names.items():
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.dtype}))
    with torch.autocast(torch.device(device).type, dtype=dtype):
        logits = model(torch.randn(8, 20, device=device))
        loss = functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long, device=device))
    loss.backward()
    return seen | {"logits": logits.dtype, "loss": loss.dtype, "gradients": model.fc1.weight.grad.dtype}


def wide_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension, kept: of 16-bit numbers PyTorch adds in float32, and rounds once."""
    return x.mean(-1, keepdim=True)


def running_mean(x: torch.Tensor) -> torch.Tensor:
    """The same, added term by term, every partial sum rounded to x's dtype."""
    total = torch.zeros_like(x[..., :1])
    for term in x.split(1, -1):
        total += term
    return total / x.shape[-1]


def layer_norm(x: torch.Tensor, dtype: torch.dtype, mean: Callable, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm without its scale and shift, every stage computed and kept in `dtype`."""
    x = x.to(dtype)
    centred = x - mean(x)
    return centred / (mean(centred**2) + eps).sqrt()
