"""What one step of a model does: the same for the clock, profilers and memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.accounting.flops import PASSES
from cs336_systems.arguments import check_choice
from cs336_systems.dtypes import DTYPES, torch_dtype
from cs336_systems.functional import cross_entropy
from cs336_systems.nvtx import annotate, recording
from cs336_systems.optimizer import AdamW


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    """Autocast to a 16-bit dtype; nothing for float32 and tf32."""
    tensors = torch_dtype(dtype)
    return nullcontext() if tensors == torch.float32 else torch.autocast(device.type, tensors)


class ModelSteps:
    """The passes of one model over one batch of random tokens, with ranges forward, backward and optimizer.

    Args:
        model: a TransformerLM, on the device to run on.
        batch_size, context_length: shape of the batch.
        dtype: "bfloat16" and "float16" run the forward under autocast; "float32" and "tf32" as it is.
        call: how the model makes logits of tokens; by default it is simply called.

    Raises:
        ValueError: the dtype is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int,
        context_length: int,
        dtype: str = "float32",
        call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
    ):
        check_choice("dtype", dtype, DTYPES)
        self.model = model
        self.dtype = dtype
        self.call = call
        embeddings = model.token_embeddings.weight
        self.device = embeddings.device
        shape = (2, batch_size, context_length)
        self.tokens, self.targets = torch.randint(len(embeddings), shape, device=self.device)
        self.optimizer = AdamW(model.parameters())

    def tensors(self) -> dict[str, list[Tensor]]:
        """What lives from step to step, by its category in `labbook.memory`."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        by_parameter = self.optimizer.state.values()
        states = [state for states in by_parameter for state in states.values()]
        return {
            "parameters": parameters + list(self.model.buffers()),
            "gradients": [gradient for gradient in gradients if gradient is not None],
            "optimizer state": [state for state in states if isinstance(state, Tensor)],
        }

    def recording(self) -> AbstractContextManager:
        return recording(self.model)

    def of(self, pass_: str) -> tuple[Callable[..., Any], Callable[[], Any] | None]:
        """The step of a pass, and what must run untimed before each step and hand it its argument, or None.

        Raises:
            ValueError: the pass is unknown.
        """
        check_choice("pass", pass_, PASSES)
        # A pass has the name of its method: forward, backward, forward_backward or train_step. A pair, whose
        # second alone is conditional: backward needs a loss, whose forward is not in its time.
        return getattr(self, pass_), self.loss if pass_ == "backward" else None

    @torch.no_grad()
    def forward(self) -> None:
        """Inference: no gradients are recorded."""
        with annotate("forward"), autocast(self.device, self.dtype):
            self.call(self.model, self.tokens)

    def loss(self) -> Tensor:
        """Forward of training, gradients of the step before set to None."""
        self.model.zero_grad(set_to_none=True)
        with annotate("forward"), autocast(self.device, self.dtype):
            return cross_entropy(self.call(self.model, self.tokens), self.targets)

    def backward(self, loss: Tensor) -> None:
        """Backward alone."""
        with annotate("backward"):
            loss.backward()

    def forward_backward(self) -> None:
        """Forward and backward."""
        self.backward(self.loss())

    def train_step(self) -> None:
        """Forward, backward and AdamW."""
        self.forward_backward()
        with annotate("optimizer"):
            self.optimizer.step()
