"""Where code that launches kernels must not go past autograd or PyTorch's dispatcher."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function: differentiating the gradients it returns raises.

    torch's `once_differentiable` does so only where an upstream gradient requires grad; after `.sum()` none
    does, and gradients depend on the inputs all the same. Here the error stands between the gradients and the
    inputs, saved or upstream, that require grad: autograd.grad(..., inputs) looks at nothing else.
    create_graph=True alone is allowed. Backward runs outside of torch.autocast: its forward chose dtypes.
    """

    @wraps(backward)
    def guarded(ctx, *upstream: Tensor) -> Any:
        if torch.compiler.is_compiling():  # compilers refuse second derivatives themselves
            return backward(ctx, *upstream)
        device = "cpu" if upstream[0].is_meta else upstream[0].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return guarded(ctx, *upstream)
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        # Unpacked once: checkpointing would not unpack them twice.
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(SimpleNamespace(**vars(ctx), saved_tensors=saved), *upstream)
        function = type(ctx).__name__.removesuffix("Backward")
        return _once(gradients, saved + upstream, function)

    return guarded


def _once(gradients: tuple, sources: tuple, function: str) -> tuple:
    """The gradients, which nobody may differentiate once more: between them and the sources a node raises."""
    reason = "has no second derivative: its gradient (create_graph=True) was differentiated"
    leaves = [None if x is None else x.detach().requires_grad_() for x in gradients]
    inputs = [x for x in sources if x is not None and x.requires_grad]
    count = len(leaves) + len(inputs)
    error = torch._C._functions.DelayedError(f"{function} {reason}".encode(), count)
    return error(*leaves, *inputs)[: len(leaves)]


_PLAIN = {Tensor, nn.Parameter}
is_compiling = torch.compiler.is_compiling
dispatch_modes = torch._C._len_torch_dispatch_stack  # fake tensors, tracing, counters of FLOPs
transforms_active = torch._C._are_functorch_transforms_active  # vmap, grad, jvp of torch.func


def needs_dispatcher(*arguments: Any) -> bool:
    """The one rule for "through the dispatcher or direct": whether a direct launch would miss something.

    It would while a compiler, a mode or a transform listens, and for a tensor that is a subclass, has no
    memory (fake, meta) or is lazily negated.
    """
    if is_compiling() or dispatch_modes() or transforms_active():
        return True
    # A loop: this is asked before every launch, and a generator is slower.
    for x in arguments:
        if isinstance(x, Tensor) and (type(x) not in _PLAIN or not x.data_ptr() or x.is_neg()):
            return True
    return False
