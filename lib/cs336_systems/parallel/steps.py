"""What a training step does over ranks: for the clock and for profilers, whatever wraps the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from cs336_systems.configs import model_size
from cs336_systems.dtypes import torch_dtype
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.parallel.launch import WorkerContext
from cs336_systems.parallel.strategies import SHARDINGS, WRAPPERS
from cs336_systems.training.steps import ModelSteps


class DataParallelSteps(ModelSteps):
    """The passes of a wrapped model; the range "communication" is the wait for gradients after backward."""

    def __init__(self, wrapped: nn.Module, batch_size: int, context_length: int, dtype: str = "float32"):
        super().__init__(wrapped.module, batch_size, context_length, dtype)
        self.model = wrapped

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


def steps_of(case: Mapping[str, Any], context: WorkerContext) -> DataParallelSteps:
    """The steps of a fresh model in one of WRAPPERS, with this rank's share of the batch.

    case: key columns of ddp_times: the model, `implementation` (the wrapper), `bucket_size_mb` or None.
    """
    where = {"attention_implementation": case["attention"], "device": context.device}
    config = model_size(case["model_size"], case["edition"])
    model, size = build_model(config, case["context_length"], **where), case["bucket_size_mb"]
    wrapped = WRAPPERS[case["implementation"]](model, **({} if size is None else {"bucket_size_mb": size}))
    share = case["batch_size"] // context.world_size
    return DataParallelSteps(wrapped, share, case["context_length"], case["dtype"])


class ShardedSteps(DataParallelSteps):
    """The steps of a fresh model under one of SHARDINGS; PyTorch's fused AdamW updates in all of them.

    bfloat16 and float16: DDP and optimizers that shard run the forward under autocast, and keep and send
    float32; an FSDP casts weights before it gathers them and gradients before it reduces them, and keeps
    float32 weights, gradients and optimizer state. There the residual stream is of 16 bits too.

    Args:
        case: model_size, edition, context_length, batch_size (of all ranks), dtype, attention,
            implementation, a name in SHARDINGS; and compiled, whether blocks go through torch.compile.
    """

    def __init__(self, case: Mapping[str, Any], context: WorkerContext):
        strategy, length = SHARDINGS[case["implementation"]], case["context_length"]
        config, where = model_size(case["model_size"], case["edition"]), {"device": context.device}
        model = build_model(config, length, attention_implementation=case["attention"], **where)
        for number, block in enumerate(model.layers if case.get("compiled") else ()):
            model.layers[number] = torch.compile(block, dynamic=False)
        share = case["batch_size"] // context.world_size
        ModelSteps.__init__(self, model, share, length, "float32" if strategy.casts else case["dtype"])
        self.optimizer = None  # the one that it made would keep whole parameters alive
        dtype, options = torch_dtype(case["dtype"]), {}
        if strategy.casts and dtype.itemsize < 4:
            options["compute_dtype"] = dtype
        if strategy.wraps_optimizer:
            self.optimizer = strategy.make_optimizer(model.parameters(), AdamW, fused=True)
            self.model = strategy.wrap(model, self.optimizer)
        else:
            self.model = strategy.wrap(model, **options)
            self.optimizer = strategy.make_optimizer(self.model.parameters(), AdamW, fused=True)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Of every tensor what this rank has."""
        return {
            category: [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
            for category, tensors in super().tensors().items()
        }
