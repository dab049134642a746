"""Training on numbers that float32 adds exactly in any order, so that nothing may differ from one process."""

import copy

import torch
from torch import nn


def exact_steps(context, layers, wrap, share=4):
    """After each of two steps: the layers trained alone on the whole batch, and wrapped on a share of it."""

    def whole_numbers(seed, *shape):
        generator = torch.Generator("cpu").manual_seed(seed)
        numbers = torch.randint(-4, 5, shape, generator=generator, device="cpu")
        return numbers.float().to(context.device)

    alone = nn.Sequential(*layers)
    for number, layer in enumerate(layers):
        layer.weight.data = whole_numbers(number, *layer.weight.shape) / 8
    wrapped = wrap(copy.deepcopy(alone))
    total = share * context.world_size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    optimizers = [torch.optim.SGD(module.parameters(), lr=2**-7) for module in (alone, wrapped)]
    for step in range(2):
        inputs, targets = (whole_numbers(step + width, total, width) for width in (8, 4))
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((alone(inputs) * targets).sum() / total).backward()
        ((wrapped(inputs[mine]) * targets[mine]).sum() / share).backward()
        wrapped.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
        yield alone, wrapped
