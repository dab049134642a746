"""Data parallelism around an untouched module: what all wrappers share, and the two that wait for backward.

Every rank holds a replica and works on its share of the batch. Between backward and the optimizer's step each
gradient is replaced by its mean over the ranks, so all replicas take the step that one process would have
taken on the whole batch (for a loss that averages over equal shares):

    model = NaiveDDP(module)
    loss(model(inputs), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cs336_systems.parallel import guards

# PyTorch 2.13 renamed both and warns about the old names. Named, not bound, so that calls can be watched.
_NEW = hasattr(dist, "all_gather_single")
ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"

GRADIENT_IS_GONE = (
    "a hook has taken a gradient away before it was averaged; allowed: the optimizer's step and zero_grad() "
    "after finish_gradient_synchronization()"
)


def start_mean(tensor: Tensor, backend: str) -> dist.Work:
    """Start to replace a tensor by its mean over the ranks; it is there after `wait()` of what is returned.

    On a GPU neither the start nor `wait()` blocks the CPU. NCCL runs on a stream of its own, which starts
    once the current stream has produced the tensor; `wait()` makes the current stream wait for NCCL's.
    """
    operation = ready_for_mean([tensor], backend)
    return dist.all_reduce(tensor, op=operation, async_op=True)


def ready_for_mean(tensors: Sequence[Tensor], backend: str) -> dist.ReduceOp:
    """Make tensors ready to be sent; what is returned reduces them to their mean over the ranks."""
    if backend == "nccl":
        # It divides on the fly.
        return dist.ReduceOp.AVG
    # Before they are added, or a sum of float16 could overflow.
    torch._foreach_div_(tensors, dist.get_world_size())
    return dist.ReduceOp.SUM


def in_backward() -> bool:
    """Whether a node of autograd's graph calls this: its hook, or a module that it computes once more."""
    return torch._C._current_autograd_node() is not None


class DataParallel(nn.Module):
    """What the wrappers share; each adds only its way to average the gradients, in `_average_gradients`.

    Wrapping checks that all ranks hold the same parameters and copies the values of rank 0, buffers
    included, to all. Tied weights are averaged once and frozen ones never. A parameter unused on some ranks
    counts as zero there; one unused on every rank keeps its gradient None, and the optimizer skips it as it
    would in one process. Buffers are not synchronised again: each rank keeps its own running statistics.

    Raises:
        RuntimeError: there is no process group. Later: a parameter was replaced or unfrozen since wrapping,
            or backward has raised and its gradients were not cleared.
        ValueError: nothing is trainable, a tensor has no memory (on the meta device, or lazy), a part is
            sharded already, or the ranks disagree.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        guards.check_process_group(self)
        self.module = module
        # A tied weight is in it once.
        parameters = list(module.parameters())
        if any(hasattr(parameter, "_is_shard") for parameter in parameters):
            raise ValueError(
                f"{type(module).__name__} holds a part of a weight; allowed: one wrapper, of whole weights"
            )
        guards.check_have_values(type(module).__name__, chain(parameters, module.buffers()))
        self._trainable = [parameter for parameter in parameters if parameter.requires_grad]
        # Indices in _trainable whose gradient is a zero of ours.
        self._unused = set[int]()
        self._synchronizes = True
        # Of the backward pass: its first gradient is there and its end to come, or it has ended.
        self._end_is_announced = False
        self._is_over = False
        # Kept, as a message should cost the CPU little.
        self._backend = dist.get_backend()
        named = chain(module.named_parameters(), module.named_buffers())
        lines = [f"{name} {guards.describe(tensor)}" for name, tensor in named]
        guards.check_ranks_agree([type(self).__name__] + lines)
        self._check_module()
        broadcast_from_rank_0(module)

    def _check_module(self) -> None:
        """Refuse what cannot be wrapped, knowing that all ranks have the same."""
        if not self._trainable:
            name = type(self.module).__name__
            raise ValueError(f"{name} has no trainable parameter; allowed: one or more")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._end_is_announced:
            self._give_up_failed_pass()
        return self.module(*args, **kwargs)

    def _give_up_failed_pass(self) -> None:
        """Before a forward: forget a backward pass that raised an error, and so has not come to its end.

        RuntimeError if it has left gradients. In backward, where a checkpoint runs a forward once more, there
        is nothing to forget: its end is still to come.
        """
        if in_backward():
            return
        if any(parameter.grad is not None for parameter in self._trainable):
            raise RuntimeError(
                "a backward pass has raised an error, and some of its gradients are there or under way; "
                "allowed: zero_grad() of the wrapper, then the next batch"
            )
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module; gradients that are under way are given up."""
        self._end_is_announced = False
        self._unused.clear()
        super().zero_grad(set_to_none)

    def _announce_end(self) -> None:
        """Called in backward: `_backward_ends` is to be called at its end, unless it raises."""
        if not self._end_is_announced:
            self._end_is_announced = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._end_is_announced = False
        # Inside a node it was only a part of the pass, as checkpoint(use_reentrant=True) runs them.
        self._is_over = not in_backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here stay on this rank and add up, to be averaged with the next."""
        outside = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = outside

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Call between backward and the optimizer's step: every `.grad` becomes the mean over the ranks."""
        trainable = {p for p in self.module.parameters() if p.requires_grad}
        if not trainable.issubset(self._trainable):
            raise RuntimeError(
                "a parameter was replaced or unfrozen since the module was wrapped; allowed: that, then wrap"
            )
        self._average_gradients()
        self._settle()

    def _average_gradients(self) -> None:
        """Leave the means in every `.grad`."""
        raise NotImplementedError

    def _gradient(self, index: int) -> Tensor:
        """The gradient that this rank contributes, as a message. It lies in `.grad`, where the mean will be:

        | `.grad` was | and is |
        |:--|:--|
        | None: the parameter was not used | zeros; `_unused` notes it |
        | None, and a hook may have taken it | RuntimeError |
        | contiguous, nothing lazy | the same |
        | another dense one | a contiguous copy; of a sparse one TypeError |
        """
        parameter = self._trainable[index]
        if parameter.grad is None:
            if self._may_be_taken(parameter):
                raise RuntimeError(GRADIENT_IS_GONE)
            self._unused.add(index)
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        message = as_message(gradient)
        if message.data_ptr() != gradient.data_ptr():
            # Else the mean would come into a copy that nobody has.
            parameter.grad = message
        return message

    def _may_be_taken(self, parameter: Tensor) -> bool:
        """Whether a hook may have used and cleared the gradient that is not there."""
        return bool(parameter._post_accumulate_grad_hooks)

    def _settle(self) -> None:
        """What no rank knows alone: which parameters no rank has used."""
        self._all_reduce_flags(self._used_here())

    def _used_here(self) -> Tensor:
        """(trainable parameters,), uint8: 1 where backward has reached one on this rank, else 0."""
        device = self._trainable[0].device
        used = torch.ones(len(self._trainable), dtype=torch.uint8, device=device)
        if self._unused:
            used[list(self._unused)] = 0
        return used

    def _all_reduce_flags(self, flags: Tensor) -> None:
        """In place. The first are of `_used_here`: what no rank has used gets None back for our zero."""
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        # Only then are the flags read, which makes the CPU wait for a GPU.
        if self._unused:
            used = flags.tolist()
            for index in self._unused:
                if not used[index]:
                    self._trainable[index].grad = None
            self._unused.clear()


class NaiveDDP(DataParallel):
    """After backward, one all-reduce for each parameter, one after the other."""

    def _average_gradients(self) -> None:
        for index in range(len(self._trainable)):
            start_mean(self._gradient(index), self._backend).wait()


class FlatDDP(DataParallel):
    """After backward, one all-reduce of all gradients, copied into one tensor (one per dtype) and back."""

    def _average_gradients(self) -> None:
        gradients = [self._gradient(index) for index in range(len(self._trainable))]
        average_flat(gradients, self._backend)


def average_flat(gradients: list[Tensor], backend: str) -> None:
    """Replace each by its mean over the ranks, in one message for each dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = _flatten_dense_tensors(group)
        start_mean(flat, backend).wait()
        torch._foreach_copy_(group, _unflatten_dense_tensors(flat, group))


def as_message(gradient: Tensor) -> Tensor:
    """Contiguous, without a graph and without what is done lazily; where it is so already, in its memory."""
    if gradient.is_sparse:
        raise TypeError(
            "a gradient is sparse; allowed: dense ones, as of nn.Embedding(sparse=False)"
        )
    return gradient.detach().resolve_conj().resolve_neg().contiguous()


def weak_hook(method: Callable, *arguments: int) -> Callable[[Tensor], None]:
    """A hook for tensors: a method whose object it does not keep, as Python cannot collect such cycles."""
    reference = weakref.ref(method.__self__)
    function = method.__func__

    def hook(_: Tensor) -> None:
        wrapper = reference()
        if wrapper is not None:
            function(wrapper, *arguments)

    return hook


@torch.no_grad()
def broadcast_from_rank_0(module: nn.Module) -> None:
    """Give every rank rank 0's parameters (the frozen ones too) and buffers."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.numel() == 0:
            continue
        whole = tensor.detach().contiguous()
        # As bytes: any dtype, booleans too.
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        if whole.data_ptr() != tensor.data_ptr():
            # What contiguous() copied has received in its place.
            tensor.copy_(whole)
