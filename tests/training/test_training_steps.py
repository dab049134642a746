"""What one step of a model does, whoever looks at it."""

import copy

import pytest
import torch

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.training.steps import ModelSteps


def test_a_pass_does_what_it_says_and_agrees_with_the_others():
    steps = ModelSteps(build_model(model_size("tiny"), 16), 2, 16)
    weights = list(steps.model.parameters())
    before = copy.deepcopy(weights)
    gradients = {}
    for pass_ in ("forward", "forward_backward", "backward", "train_step"):
        steps.model.zero_grad(set_to_none=True)
        step, prepare = steps.of(pass_)
        argument = () if prepare is None else (prepare(),)
        # What comes before a step leaves no gradient.
        assert all(weight.grad is None for weight in weights)
        step(*argument)
        gradients[pass_] = [weight.grad for weight in weights]
        unchanged = all(map(torch.equal, weights, before))
        assert unchanged == (pass_ != "train_step")
    assert gradients["forward"] == [None] * len(before)
    for pass_ in ("backward", "train_step"):
        assert all(map(torch.equal, gradients[pass_], gradients["forward_backward"]))
    with pytest.raises(ValueError, match="eval"):
        steps.of("eval")
    with pytest.raises(ValueError, match="'int8'"):
        ModelSteps(steps.model, 2, 16, "int8")
