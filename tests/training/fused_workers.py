"""Workers for test_fused_model.py."""

import copy

import torch

from cs336_systems.configs import ModelConfig
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.parallel import FSDP

CONFIG = ModelConfig("test", 2026, d_model=32, d_ff=48, num_layers=2, num_heads=2, vocab_size=64)
SEQUENCE = 16


def trains_as_one_process(context):
    """FSDP of a model on fused blocks that keep little: the weights of the plain one, on the whole batch."""
    from cs336_systems.training import fused_block
    from cs336_systems.training.fused import use_fused_blocks

    calls, apply = [], fused_block.BlockFunction.apply
    fused_block.BlockFunction.apply = lambda *given: calls.append(1) or apply(*given)
    torch.manual_seed(0)
    plain = build_model(CONFIG, SEQUENCE, device=context.device)
    fused = use_fused_blocks(copy.deepcopy(plain))
    fused.layers[0].keep, fused.layers[1].keep = ("h",), ("qkv",)
    wrapped = FSDP(fused, unit_types=("TransformerBlock",))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    tokens, targets = torch.randint(CONFIG.vocab_size, (2, 2, SEQUENCE), device=context.device)
    mine = slice(context.rank, context.rank + 1)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(plain(tokens), targets).backward()
        wrapped(tokens[mine], targets[mine]).backward()
        wrapped.finish_gradient_synchronization()
        for optimizer in optimizers:
            optimizer.step()
    assert len(calls) == 4, "the blocks are taken apart"
    weights = wrapped.gather_full_parameters()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
