"""A TransformerLM that computes with the fused kernels: its modules stay, the functions they call change.

    use_fused_kernels(model)
    loss = model(token_ids, targets)      # without targets: the logits, as before

Parameters, their names and the state dict stay, and so do the modules' types.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems import functional
from cs336_systems.model import (
    CausalSelfAttention,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerLM,
    run_block,
)
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy


class LossHead(Linear):
    """Logits of hidden states; of hidden states and targets the loss, and then no logits are kept.

    It takes over the weight of another layer.
    """

    def __init__(self, layer: Linear):
        nn.Module.__init__(self)
        self.weight = layer.weight

    @property
    def takes_targets(self) -> bool:
        """Not where a hook, other than those that shard or observe, expects logits."""
        hooks = *self._forward_pre_hooks.values(), *self._forward_hooks.values()
        return all(hook.__module__.startswith(("cs336_systems.", "torch.")) for hook in hooks)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight) if targets is None else linear_cross_entropy(x, self.weight, targets)


_FORWARDS = {kind: kind.forward for kind in (Linear, RMSNorm, RotaryEmbedding, CausalSelfAttention, SwiGLU)}


def use_fused_loss(model: TransformerLM) -> TransformerLM:
    """Change the model in place: with targets, no logits are held. A head that is no plain layer stays."""
    if is_as_written(model.lm_head, Linear):
        model.lm_head = LossHead(model.lm_head)
    return model


def use_fused_kernels(model: TransformerLM) -> TransformerLM:
    """Change the model in place: norms, rotary embeddings, gates and the loss compute with kernels.

    What computes with another function than the model was written with keeps it.

    Raises:
        ImportError: Triton is not installed.
    """
    from cs336_systems.kernels.rms_norm import rms_norm
    from cs336_systems.kernels.rotary import rotary
    from cs336_systems.kernels.swiglu import swiglu

    kernels = {
        RMSNorm: ("norm", functional.rms_norm, rms_norm),
        RotaryEmbedding: ("rotate", functional.rotary, rotary),
        SwiGLU: ("gate", None, swiglu),
    }
    for module in model.modules():
        name, plain, kernel = kernels.get(type(module), ("", None, None))
        if name and getattr(module, name) is plain:
            setattr(module, name, kernel)
    return use_fused_loss(model)


def use_fused_blocks(model: TransformerLM) -> TransformerLM:
    """`use_fused_kernels(model)`, and a backward by hand in its blocks, see `training.fused_block`."""
    from cs336_systems.training.fused_block import run_fused

    use_fused_kernels(model)
    for layer in model.layers:
        if getattr(layer, "run", None) is run_block:
            layer.run = run_fused
    return model


def is_as_written(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module does what `kind` says and nothing else: no subclass, patch or hook.

    Adapters and parametrizations are subclasses or other modules. Hooks that only observe do not count.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    hooks += (module._backward_pre_hooks,)
    observe = all(getattr(hook, "only_observes", False) for each in hooks for hook in each.values())
    patched = "forward" in vars(module) or kind.forward is not _FORWARDS[kind]
    return type(module) is kind and observe and not patched
