"""What a training step does over ranks: for the clock and for profilers, whatever wraps the model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.parallel.launch import WorkerContext
from cs336_systems.parallel.strategies import WRAPPERS
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

    Args:
        case: key columns of ddp_times: the model, `implementation` (the wrapper), `bucket_size_mb` or None.
    """
    where = {"attention_implementation": case["attention"], "device": context.device}
    config = model_size(case["model_size"], case["edition"])
    model, size = build_model(config, case["context_length"], **where), case["bucket_size_mb"]
    wrapped = WRAPPERS[case["implementation"]](model, **({} if size is None else {"bucket_size_mb": size}))
    share = case["batch_size"] // context.world_size
    return DataParallelSteps(wrapped, share, case["context_length"], case["dtype"])
