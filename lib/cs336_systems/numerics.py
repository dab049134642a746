"""Replaying floating-point rounding step by step."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accumulation:
    """How one running sum is kept: `total += addend`, each in its own dtype."""

    case: str
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
    """Add `value` `count` times and keep every partial sum.

    Returns:
        float64 tensor (count + 1,), starting at 0: exactly the numbers the accumulator held.
    """
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

    Returns:
        rows with `total` (where it enters the binade), `spacing`, `increment`, `additions` (made there) and
        `end`; the last `end` is the sum.
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
        rows.append(
            {
                "total": total,
                "spacing": spacing(total, dtype),
                "increment": increment,
                "additions": additions,
                "end": end,
            }
        )
        total = end
        left -= additions
    return rows
