"""What one step of a model does, whoever looks at it."""

import pytest
import torch

from cs336_systems.configs import model_size
from cs336_systems.measure.model_steps import ModelSteps
from cs336_systems.model import build_model


def test_passes_agree_with_each_other():
    steps = ModelSteps(build_model(model_size("tiny"), 16), 2, 16)
    parameters = list(steps.model.parameters())
    steps.forward()
    assert all(parameter.grad is None for parameter in parameters)
    steps.forward_backward()
    gradients = [parameter.grad.clone() for parameter in parameters]
    step, before = steps.of("backward")
    step(before())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, gradients, strict=True))
    before = steps.model.lm_head.weight.clone()
    steps.train_step()
    assert not torch.equal(before, steps.model.lm_head.weight)
    with pytest.raises(ValueError, match="'eval'"):
        steps.of("eval")


def test_autocast_is_the_dtype():
    steps = ModelSteps(build_model(model_size("tiny"), 16), 2, 16, "bfloat16")
    seen = []
    steps.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    steps.forward()
    assert seen == [torch.bfloat16]
    with pytest.raises(ValueError, match="'int8'"):
        ModelSteps(steps.model, 2, 16, "int8")
