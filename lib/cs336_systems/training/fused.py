"""A TransformerLM that computes with the fused kernels: its modules stay, the functions they call change.

    use_fused_kernels(model)
    loss = model(token_ids, targets)      # without targets: the logits, as before

Parameters, their names and the state dict stay, and so do the modules' types and what the user put into them.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems import functional, model
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy


def hooks_of(module: nn.Module) -> list[Callable]:
    """Every hook that a call of the module runs."""
    forward = module._forward_pre_hooks | module._forward_hooks
    backward = module._backward_pre_hooks | module._backward_hooks
    return list(forward.values()) + list(backward.values())


class LossHead(model.Linear):
    """Logits of hidden states; of hidden states and targets the loss, and then no logits are kept."""

    def __init__(self, layer: model.Linear):
        nn.Module.__init__(self)
        self.weight = layer.weight  # taken over

    @property
    def takes_targets(self) -> bool:
        """Not where a hook, other than those that shard or observe, expects logits."""
        harmless = ("cs336_systems.", "torch.")
        return all(hook.__module__.startswith(harmless) for hook in hooks_of(self))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, targets)


_KINDS = (
    model.Linear,
    model.RMSNorm,
    model.RotaryEmbedding,
    model.CausalSelfAttention,
    model.SwiGLU,
)
_FORWARDS = {kind: kind.forward for kind in _KINDS}


def use_fused_loss(lm: model.TransformerLM) -> model.TransformerLM:
    """Change the model in place: with targets, no logits are held. A head that is no plain layer stays."""
    if is_as_written(lm.lm_head, model.Linear):
        lm.lm_head = LossHead(lm.lm_head)
    return lm


def use_fused_kernels(lm: model.TransformerLM) -> model.TransformerLM:
    """Change the model in place: norms, rotary embeddings, gates and the loss compute with kernels.

    Raises:
        ImportError: Triton is not installed.
    """
    from cs336_systems.kernels.rms_norm import rms_norm
    from cs336_systems.kernels.rotary import rotary
    from cs336_systems.kernels.swiglu import swiglu

    for module in lm.modules():
        if type(module) is model.RMSNorm and module.norm is functional.rms_norm:
            module.norm = rms_norm
        elif type(module) is model.RotaryEmbedding and module.rotate is functional.rotary:
            module.rotate = rotary
        elif type(module) is model.SwiGLU and module.gate is None:
            module.gate = swiglu
    return use_fused_loss(lm)


def is_as_written(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module does what `kind` says and nothing else: no subclass, patch or hook.

    Adapters and parametrizations are subclasses or other modules. Hooks that only observe do not count.
    """
    observe = all(getattr(hook, "only_observes", False) for hook in hooks_of(module))
    # A patch of the class would be skipped as well as one of the module: kernels call no forward.
    patched = "forward" in vars(module) or kind.forward is not _FORWARDS[kind]
    return type(module) is kind and observe and not patched
