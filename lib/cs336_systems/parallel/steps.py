"""What a training step does over ranks: for the clock and for profilers, whatever wraps the model."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, AdamW, Optimizer

from cs336_systems import optimizer as ours
from cs336_systems.configs import ModelConfig
from cs336_systems.dtypes import torch_dtype
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.parallel.launch import WorkerContext
from cs336_systems.parallel.strategies import Strategy
from cs336_systems.training.steps import ModelSteps

Wrap = Callable[[nn.Module], nn.Module]


class DataParallelSteps(ModelSteps):
    """The passes of a wrapped model; the range "communication" is the wait for gradients after backward."""

    def tensors(self) -> dict[str, list[Tensor]]:
        """Of every tensor what this rank has: of a DTensor, as FSDP2 makes them, its `_local_tensor`."""
        return {
            category: [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
            for category, tensors in super().tensors().items()
        }

    def train_step(self) -> None:
        """Forward, backward, the mean of the gradients, and AdamW."""
        self.forward_backward()
        self.communicate()
        self.update()

    def train_without_communication(self) -> None:
        """The same on this rank alone, to see how much of the communication a step does not hide."""
        with self.model.no_sync():
            self.forward_backward()
        self.update()

    def communicate(self) -> None:
        """Average whatever has not been averaged; after a pass under no_sync(), that is everything."""
        with annotate("communication"):
            self.model.finish_gradient_synchronization()

    def update(self) -> None:
        """The optimizer's step."""
        with annotate("optimizer"):
            self.optimizer.step()


def _unwrapped_steps(
    config: ModelConfig,
    context: WorkerContext,
    dtype: str,
    *,
    context_length: int,
    batch_size: int,
    attention: str = "plain",
    compiled: bool = False,
) -> DataParallelSteps:
    """The steps of a fresh model with this rank's share of the batch; they have no optimizer yet.

    batch_size: sequences of all ranks, a multiple of their number: what is left over is dropped.
    compiled: the model's blocks go through torch.compile.
    """
    model = build_model(
        config, context_length, attention_implementation=attention, device=context.device
    )
    if compiled:
        for number, block in enumerate(model.layers):
            model.layers[number] = torch.compile(block, dynamic=False)
    steps = DataParallelSteps(model, batch_size // context.world_size, context_length, dtype)
    # It would keep whole parameters alive that are about to be sharded.
    steps.optimizer = None
    return steps


def steps_of(
    config: ModelConfig,
    wrap: Wrap,
    context: WorkerContext,
    *,
    dtype: str = "float32",
    optimizer: str = "AdamW",
    **shape: Any,
) -> DataParallelSteps:
    """The steps of a fresh model that is wrapped.

    wrap: a wrapper of whole modules, such as `strategies.wrapper("naive")`.
    optimizer: a name of OPTIMIZERS.
    shape: see `_unwrapped_steps`.
    """
    steps = _unwrapped_steps(config, context, dtype, **shape)
    steps.model = wrap(steps.model)
    steps.optimizer = OPTIMIZERS[optimizer](steps.model.parameters())
    return steps


def sharded_steps(
    config: ModelConfig,
    strategy: Strategy,
    context: WorkerContext,
    *,
    dtype: str = "float32",
    **shape: Any,
) -> DataParallelSteps:
    """Likewise under a strategy of SHARDINGS; PyTorch's fused AdamW updates in all of them.

    bfloat16 and float16: DDP and optimizers that shard run the forward under autocast, and keep and send
    float32; an FSDP casts weights before it gathers them and gradients before it reduces them, and keeps
    float32 weights, gradients and optimizer state. There the residual stream is of 16 bits too.
    """
    steps = _unwrapped_steps(config, context, "float32" if strategy.casts else dtype, **shape)
    steps.model, steps.optimizer = strategy.apply(steps.model, torch_dtype(dtype))
    return steps


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "AdamW": ours.AdamW,  # one parameter after the other
    "fused AdamW": partial(AdamW, fused=True),  # PyTorch's: many parameters in a kernel
}


def training_drift(
    context: WorkerContext,
    runs: Iterable[tuple[Mapping[str, Any], Wrap, str]],
    config: ModelConfig,
    *,
    context_length: int,
    batch_size: int,
    steps: int,
) -> None:
    """Train as each run says, and beside it one process on the whole batch; rank 0 sends each step's rows.

    Every rank starts from its own random weights, as it would without care; the process alone starts from
    those of rank 0. After each step there are two rows of training_drift, their `max_difference` the largest
    of any weight: compared "weights" with the process alone, compared "replicas" between the ranks.

    Args:
        runs: columns that its rows shall have, the wrapper, and the name of one of OPTIMIZERS.
        batch_size: sequences of all ranks, a multiple of their number.
    """
    share = batch_size // context.world_size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    for columns, wrap, optimizer in runs:
        torch.manual_seed(0)
        alone = build_model(config, context_length, device=context.device)
        torch.manual_seed(context.rank)
        wrapped = wrap(build_model(config, context_length, device=context.device))
        optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in (alone, wrapped)]
        for step in range(steps):
            # The same batch on every rank.
            generator = torch.Generator().manual_seed(step)
            shape = (batch_size, context_length + 1)
            tokens = torch.randint(config.vocab_size, shape, generator=generator).to(context.device)
            for model, batch in ((alone, tokens), (wrapped, tokens[mine])):
                model.zero_grad()
                cross_entropy(model(batch[:, :-1]), batch[:, 1:]).backward()
            wrapped.finish_gradient_synchronization()
            for of_model in optimizers:
                of_model.step()
            differences = _differences(alone, wrapped).items()
            key = dict(columns, step_index=step + 1)
            rows = [{"compared": name, "max_difference": x} for name, x in differences]
            context.send([key | row for row in rows])


def _differences(alone: nn.Module, wrapped: nn.Module) -> dict[str, float]:
    """Of any weight of any rank: from the process alone, and from another rank. Gloo may lose a NaN."""
    weights = parameters_to_vector(alone.parameters()).detach()
    low = parameters_to_vector(wrapped.parameters()).detach()
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    from_alone = torch.maximum(high - weights, weights - low)
    return {"weights": from_alone.max().item(), "replicas": (high - low).max().item()}
