"""AdamW, written out: Adam's running moments with the weight decay kept apart from the gradient."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), equal to `torch.optim.AdamW`.

    A parameter's state is `exp_avg` and `exp_avg_sq`, two tensors of its own shape and type. A step works
    in place, parameter by parameter, so the only other memory it takes is one buffer as large as the largest
    parameter. Parameters without a gradient are skipped. It can load a state of torch's, but does not do what
    other settings of torch's there say (amsgrad, maximize).

    Args:
        params: parameters, or groups of them as dictionaries that may override the settings below.
        lr: step size; betas: how slowly the mean and the mean square of the gradient forget, in [0, 1);
        eps: keeps the division finite; weight_decay: each step takes lr * weight_decay of the weight off it.

    Raises:
        ValueError: a setting is outside its range.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        _check_settings(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; returns the closure's loss, if there is a closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict) -> None:
        gradient = parameter.grad
        if gradient.is_sparse:
            raise RuntimeError("AdamW does not take sparse gradients; make the gradient dense")
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # In a loaded state of torch.optim.AdamW it is a float32 tensor.
        state["step"] = int(state["step"]) + 1
        mean = state["exp_avg"]
        mean_square = state["exp_avg_sq"]
        beta1, beta2 = group["betas"]

        # A pair of real numbers each, as in torch.optim.AdamW.
        if parameter.is_complex():
            tensors = parameter, gradient.resolve_conj(), mean, mean_square
            parameter, gradient, mean, mean_square = map(torch.view_as_real, tensors)

        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        mean_square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # Both moments start at zero; dividing by 1 - beta^step takes that bias out.
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        denominator = mean_square.sqrt().div_(correction2**0.5).add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / correction1)


def _check_settings(settings: dict) -> None:
    for name in ("lr", "eps", "weight_decay"):
        value = settings[name]
        if not 0 <= value < math.inf:  # nor NaN
            raise ValueError(f"{name} must be a finite number of at least 0; got {value!r}")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1); got {betas!r}")
