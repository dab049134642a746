"""Where and in which dtypes functions of tensors are tried; and the same numbers in every layout."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def heads_inside(x):
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def every_second_row(x):
    twice = x.repeat_interleave(2, -2)
    return twice[..., ::2, :]


def every_second_column(x):
    twice = x.repeat_interleave(2, -1)
    return twice[..., ::2]


def a_part_of_each_row(x):
    wide = torch.cat((x, x + 1), -1)
    return wide[..., : x.shape[-1]]


def off_alignment(x, places):
    numbers = torch.cat((x.new_zeros(places), x.flatten()))
    return numbers[places:].view(x.shape)


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads inside": heads_inside,
    "columns first": lambda x: x.mT.contiguous().mT,
    "every second row": every_second_row,
    "every second column": every_second_column,
    "a part of each row": a_part_of_each_row,
    "off alignment by 1": lambda x: off_alignment(x, 1),
    "off alignment by 8": lambda x: off_alignment(x, 8),
}
