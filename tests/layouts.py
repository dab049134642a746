"""Where and in which dtypes functions of tensors are tried; and the same numbers in every layout."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LAYOUTS = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "columns first": lambda x: x.mT.contiguous().mT,
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "every second column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a part of each row": lambda x: torch.cat((x, x + 1), -1)[..., : x.shape[-1]],
    "off alignment by 1": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "off alignment by 8": lambda x: torch.cat((x.new_zeros(8), x.flatten()))[8:].view(x.shape),
}
