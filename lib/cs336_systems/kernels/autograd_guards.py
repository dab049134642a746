"""Where code that launches kernels must not go past autograd or PyTorch's dispatcher."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function: differentiating the gradients it returns raises.

    torch's `once_differentiable` does so only where an upstream gradient requires grad; after `.sum()` none
    does, and gradients depend on the inputs all the same. create_graph=True alone is allowed. Backward runs
    outside of torch.autocast, as its forward chose the dtypes.
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
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        return _undifferentiable(backward.__qualname__.split(".")[0], gradients)

    return guarded


def _undifferentiable(function: str, gradients: Any) -> tuple[Tensor | None, ...]:
    """Aliases of the gradients of a Function that raise when they are differentiated."""
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    leaves = [None if x is None else x.detach().requires_grad_() for x in gradients]
    message = f"{function} has no second derivative: its gradient (create_graph=True) was differentiated"
    return torch._C._functions.DelayedError(message.encode(), len(leaves))(*leaves)


_PLAIN, _is_compiling = {Tensor, nn.Parameter}, torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack  # fake tensors, tracing, counters of FLOPs
_transforms_active = torch._C._are_functorch_transforms_active  # vmap, grad, jvp of torch.func


def needs_dispatcher(*arguments: Any) -> bool:
    """Whether a direct launch would miss something that the dispatcher does for one of these tensors."""
    if _is_compiling() or _dispatch_modes() or _transforms_active():
        return True
    for x in arguments:
        if type(x) in _PLAIN:
            if not x.data_ptr() or x.is_neg():
                return True
        elif isinstance(x, Tensor):
            return True
    return False
