"""Checkpoints of FSDP through torch.distributed.checkpoint: the state comes back, on any number of ranks."""

import pytest
import torch

from cs336_systems import parallel
from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.optimizer import AdamW
from cs336_systems.parallel import checkpoint

ODD = ModelConfig(
    "odd", 2025, 12, 28, 2, 3, vocab_size=17
)  # rows that two and three ranks cannot share


def train(context, folder, first, last, save, **options):
    """From the newest checkpoint, which is to be of `first` steps, on; returns the full parameters."""
    torch.manual_seed(context.rank)
    wrapped = parallel.FSDP(build_model(ODD, 8), unit_types=("TransformerBlock",))
    optimizer = (torch.optim.AdamW if "amsgrad" in options else AdamW)(
        wrapped.parameters(), **options
    )
    assert checkpoint.load(folder, wrapped, optimizer) == first
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(
            ODD.vocab_size, (2, 9), generator=generator
        )  # the same on every rank
        optimizer.zero_grad()
        cross_entropy(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
    if save:
        checkpoint.save(folder, last, wrapped, optimizer)
    return {name: weight.clone() for name, weight in wrapped.gather_full_parameters().items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path, ranks):
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"amsgrad": True} if ranks == 3 else {})
    alone = parallel.launch(train, 2, tmp_path / "none", 0, 5, False, backend="gloo", **options)[0]
    parallel.launch(train, 2, tmp_path, 0, 3, True, backend="gloo", **options)
    (tmp_path / "00000009").mkdir()  # whoever wrote this one was killed
    resumed = parallel.launch(train, ranks, tmp_path, 3, 5, False, backend="gloo", **options)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-5, atol=1e-6)
        if ranks == 2:
            assert torch.equal(resumed[name], weight)
