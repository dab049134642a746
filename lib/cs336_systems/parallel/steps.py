"""What a training step does over ranks: for the clock and for profilers, whatever wraps the model."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from cs336_systems import optimizer as ours
from cs336_systems.configs import model_size
from cs336_systems.dtypes import torch_dtype
from cs336_systems.functional import cross_entropy
from cs336_systems.model import build_model
from cs336_systems.nvtx import annotate
from cs336_systems.parallel.collective_calls import Message, watch_collectives
from cs336_systems.parallel.launch import WorkerContext
from cs336_systems.parallel.strategies import SHARDINGS, WRAPPERS
from cs336_systems.training.steps import ModelSteps


class DataParallelSteps(ModelSteps):
    """The passes of a wrapped model; the range "communication" is the wait for gradients after backward."""

    def __init__(
        self, wrapped: nn.Module, batch_size: int, context_length: int, dtype: str = "float32"
    ):
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
    wrapped = wrap(build_model(config, case["context_length"], **where), case)
    share = case["batch_size"] // context.world_size
    return DataParallelSteps(wrapped, share, case["context_length"], case["dtype"])


def wrap(module: nn.Module, case: Mapping[str, Any]) -> nn.Module:
    """The module in the case's wrapper, with its `bucket_size_mb` if it has one."""
    size = case["bucket_size_mb"]
    return WRAPPERS[case["implementation"]](
        module, **({} if size is None else {"bucket_size_mb": size})
    )


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
        ModelSteps.__init__(
            self, model, share, length, "float32" if strategy.casts else case["dtype"]
        )
        self.optimizer = None  # the one that it made would keep whole parameters alive
        dtype, options = torch_dtype(case["dtype"]), {}
        if strategy.casts and dtype.itemsize < 4:
            options["compute_dtype"] = dtype
        if strategy.wraps_optimizer:
            self.optimizer = strategy.make_optimizer(model.parameters(), fused=True)
            self.model = strategy.wrap(model, self.optimizer)
        else:
            self.model = strategy.wrap(model, **options)
            self.optimizer = strategy.make_optimizer(self.model.parameters(), fused=True)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Of every tensor what this rank has."""
        return {
            category: [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
            for category, tensors in super().tensors().items()
        }


OPTIMIZERS = {"SGD": partial(SGD, lr=0.1, momentum=0.9), "AdamW": ours.AdamW}


def training_drift(context: WorkerContext, cases: Iterable[Mapping[str, Any]], steps: int) -> None:
    """Train under each case's wrapper, and beside it one process on the whole batch; rank 0 sends rows.

    Every rank starts from its own random weights, as it would without care; the process alone starts from
    those of rank 0. After each step there are two rows of training_drift, their `max_difference` the largest
    of any weight: compared "weights" with the process alone, compared "replicas" between the ranks.
    """
    for case in cases:
        config, models = model_size(case["model_size"], case["edition"]), []
        for seed in (0, context.rank):
            torch.manual_seed(seed)
            models.append(build_model(config, case["context_length"], device=context.device))
        alone, wrapped = models[0], wrap(models[1], case)
        optimizers = [OPTIMIZERS[case["optimizer"]](model.parameters()) for model in models]
        share = case["batch_size"] // context.world_size
        shares = slice(None), slice(context.rank * share, (context.rank + 1) * share)
        for step in range(1, steps + 1):
            generator = torch.Generator().manual_seed(step - 1)  # the same batch on every rank
            shape = case["batch_size"], case["context_length"] + 1
            tokens = torch.randint(config.vocab_size, shape, generator=generator).to(context.device)
            for model, mine, optimizer in zip((alone, wrapped), shares, optimizers, strict=True):
                optimizer.zero_grad()
                cross_entropy(model(tokens[mine, :-1]), tokens[mine, 1:]).backward()
                if model is wrapped:
                    wrapped.finish_gradient_synchronization()
                optimizer.step()
            vectors = [parameters_to_vector(each.parameters()).detach() for each in models]
            weights, low, high = *vectors, vectors[1].clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            found = {
                "weights": torch.maximum(high - weights, weights - low),
                "replicas": high - low,
            }
            rows = [
                {"compared": name, "max_difference": x.max().item()} for name, x in found.items()
            ]
            context.send([{**case, "step_index": step, **row} for row in rows])


def log_messages(
    context: WorkerContext, wrappers: Mapping[Any, Callable[[nn.Module], nn.Module]]
) -> list[dict[str, Any]]:
    """The all-reduces of gradients in two steps of a tiny Transformer, in their order, under each wrapper.

    Returns:
        One dictionary a message: wrapper, step_index, message (both from 1), gradients (in it), mib, ready
        and ready_mib (how many of the step's gradients were when it left), last_gradient (the name of the
        last in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    rows, config = [], model_size("tiny")
    for name, make in wrappers.items():
        module, ready, log = build_model(config, 16, device=context.device), set(), []
        for parameter in module.parameters():  # before the wrapper's own hooks
            parameter.register_post_accumulate_grad_hook(ready.add)
        wrapped, note = make(module), partial(_log_gradients, module, ready, log)
        for step in (1, 2):
            ready.clear()
            log.clear()
            wrapped.zero_grad()
            with watch_collectives(notify=note):
                wrapped(
                    torch.zeros(1, 16, dtype=torch.long, device=context.device)
                ).sum().backward()
                wrapped.finish_gradient_synchronization()
            memory = {
                parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()
            }
            of_step = {"wrapper": name, "step_index": step, "buffers": len(memory)}
            rows += [
                of_step | {"message": number} | sent for number, sent in enumerate(log, start=1)
            ]
    return rows


def _log_gradients(module: nn.Module, ready: set, log: list, message: Message) -> None:
    """Which gradients lie in a message; flags and the like have none."""
    gradients = [
        (each.grad.data_ptr(), name, each.nbytes)
        for name, each in module.named_parameters()
        if each.grad is not None
    ]
    inside = sorted(each for each in gradients if 0 <= each[0] - message.address < message.bytes)
    if inside:
        row = {
            "gradients": len(inside),
            "mib": sum(size for *_, size in inside) / 2**20,
            "ready": len(ready),
        }
        row |= {
            "ready_mib": sum(each.nbytes for each in ready) / 2**20,
            "last_gradient": inside[-1][1],
        }
        log.append(row)
