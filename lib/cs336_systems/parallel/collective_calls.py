"""What the ranks send to each other: the collectives that are called, carried out, left out, or counted."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from cs336_systems.model import SwiGLU
from cs336_systems.parallel.launch import WorkerContext, launch

Rows = list[dict[str, Any]]
MakeLayer = Callable[[SwiGLU, DeviceMesh], nn.Module | None]
# The handle of a collective that needs no waiting: it is over, or was not carried out.
_DONE = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


class Message:
    """One call of a collective, and, to check others, its handle. It keeps no tensor that was waited for.

    numel, bytes, dtype, storage, address: of its largest tensor on this rank, or list of some.
    sent_bytes: what this rank sent to its neighbour, where collectives are carried out as rings.
    """

    def __init__(self, collective: str, arguments: Sequence[Any]):
        self.collective, self._work, self.sent_bytes = collective, _DONE, 0
        self.is_async = any(x is True for x in arguments)
        self.waited_for = not self.is_async
        group = next((x for x in arguments if isinstance(x, dist.ProcessGroup)), None)
        self.ranks = dist.get_world_size(group)
        lists = [x if isinstance(x, list | tuple) else [x] for x in arguments]
        lists = [each for each in lists if each and isinstance(each[0], Tensor)] or [
            [torch.empty(0)]
        ]
        largest = max(lists, key=lambda each: sum(x.numel() for x in each))
        self.numel, self.bytes = sum(x.numel() for x in largest), sum(x.nbytes for x in largest)
        self.dtype = largest[0].dtype
        self.storage, self.address = (
            StorageWeakRef(largest[0].untyped_storage()),
            largest[0].data_ptr(),
        )

    def __getattr__(self, name: str) -> Any:
        self.waited_for = True
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        self.waited_for, work, self._work = True, self._work, _DONE
        return work.wait(*args)


@contextmanager
def watch_collectives(
    *,
    send: bool = True,
    as_rings: bool = False,
    notify: Callable[[Message], Any] = lambda message: None,
    checks: bool = False,
) -> Iterator[list[Message]]:
    """A list that fills with the collectives called inside, by whoever calls them as dist.all_reduce(...).

    Args:
        send: False leaves them out: every buffer stays as it is. What is then computed is wrong, but takes
            the time that it takes with nothing sent.
        as_rings: carry them out as rings, hop by hop, and count every send:
            Gloo and NCCL do not tell what they put on the wire. Sums and means of CPU tensors.
        notify: called with each when it has started.
        checks: return the messages as handles, to see whether somebody waits for them, and watch the names
            under which functions are pickled, too.
    """
    messages: list[Message] = []
    under_way: list[
        str
    ] = []  # an older name of a function calls the newer, which is no message of its own

    def watched(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        ring = _RINGS.get(name)
        if under_way or (ring is None and not checks):
            return function(*args, **kwargs)
        message, work = Message(_COLLECTIVES[name], [*args, *kwargs.values()]), _DONE
        under_way.append(name)
        try:
            if as_rings:
                message.sent_bytes = ring(*args, **kwargs)
            elif send:
                work = function(*args, **kwargs) or _DONE
        finally:
            under_way.pop()
        if checks:
            message._work, work = work, message
        messages.append(message)
        notify(message)
        return work if message.is_async else None

    calls = {
        name: partial(watched, name, getattr(dist, name))
        for name in _COLLECTIVES
        if hasattr(dist, name)
    }
    with ExitStack() as stack:
        for module in (dist, dist.distributed_c10d) if checks else (dist,):
            stack.enter_context(patch.multiple(module, **calls))
        yield messages


def pass_on(leaving: Tensor, arriving: Tensor, group: Any = None) -> int:
    """Send a tensor to the next rank of a ring and receive the previous one's; returns the bytes sent."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    coming = dist.irecv(arriving, group=group, group_src=(rank - 1) % n)
    dist.isend(leaving, group=group, group_dst=(rank + 1) % n).wait()
    coming.wait()
    return leaving.nbytes


# The collectives as rings, with the parameters of torch.distributed. Each returns the bytes that it sent.


def all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> int:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    pieces = whole.view(-1).tensor_split(dist.get_world_size(group))
    count = _reduce(pieces, group, op) + _around(pieces, dist.get_rank(group), group, Tensor.copy_)
    tensor.detach().copy_(whole)
    return count


def all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> int:
    pieces = output_tensor.detach().view(-1).chunk(dist.get_world_size(group))
    pieces[rank := dist.get_rank(group)].copy_(input_tensor.detach().flatten())
    return _around(pieces, rank, group, Tensor.copy_)


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> int:
    pieces = input.detach().flatten().clone().chunk(dist.get_world_size(group))
    count = _reduce(pieces, group, op)
    output.detach().copy_(pieces[dist.get_rank(group)].view_as(output))
    return count


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> int:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    whole, is_last = tensor.detach().contiguous(), (rank + 1) % n == src
    if rank != src:
        dist.recv(whole, group=group, group_src=(rank - 1) % n)
        tensor.detach().copy_(whole)
    if not is_last:
        dist.send(whole, group=group, group_dst=(rank + 1) % n)
    return 0 if is_last else whole.nbytes


# By the names of their functions, of which PyTorch 2.13 renamed two.
_RINGS = {"all_reduce": all_reduce, "broadcast": broadcast}
_RINGS |= dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), all_gather)
_RINGS |= dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), reduce_scatter)
_COLLECTIVES = {name: ring.__name__ for name, ring in _RINGS.items()}
_COLLECTIVES |= {name: name for name in ("reduce", "all_gather", "reduce_scatter")}


def _reduce(pieces: tuple[Tensor, ...], group: Any, op: Any) -> int:
    """Add up the pieces of all ranks; rank r ends with piece r."""
    rank = dist.get_rank(group)
    count = _around(pieces, rank - 1, group, Tensor.add_)
    if op == dist.ReduceOp.AVG:
        pieces[rank].div_(len(pieces))
    return count


def _around(
    pieces: tuple[Tensor, ...], first: int, group: Any, take: Callable[[Tensor, Tensor], Any]
) -> int:
    """In each of n - 1 hops pass a piece to the next rank, from `first` on backwards, and take the last's."""
    n, count = len(pieces), 0
    for hop in range(n - 1):
        piece = pieces[(first - hop - 1) % n]
        received = torch.empty_like(piece)
        count += pass_on(pieces[(first - hop) % n], received, group)
        take(piece, received)
    return count


def count_sent_bytes(
    layers: Mapping[str, MakeLayer],
    meshes: Sequence[tuple[int, int]],
    *,
    d_model: int,
    d_ff: int,
    tokens: int,
) -> Rows:
    """Run sharded SwiGLU layers in bfloat16 on every mesh, each collective as a ring of counted sends.

    Args:
        layers: by name, what makes one on each rank: called with the whole layer, equal on all, and the mesh,
            whose axes are "x", along which the tokens are split, and "y". It makes None on a mesh that is not
            for it. A layer's finish_gradient_synchronization() belongs to backward.
        meshes: (X, Y), one after the other.
        tokens: of all ranks together.

    Returns:
        One dictionary for each collective of each rank: layer, X, Y, rank, pass, collective, ranks (in it),
        sent_bytes, error (of output and input gradient against the whole layer, relative).

    Raises:
        ValueError: there is no mesh, X or Y is not from 1 on, or X does not divide the tokens.
    """
    if not meshes or any(x < 1 or y < 1 or tokens % x for x, y in meshes):
        raise ValueError(
            f"meshes is {meshes}; allowed: pairs (X, Y) from 1 on, X dividing the {tokens} tokens"
        )
    what = dict(layers), tuple(meshes), d_model, d_ff, tokens
    by_rank = launch(_count, max(x * y for x, y in meshes), *what, backend="gloo", timeout_s=120.0)
    return [row for rows in by_rank for row in rows]


def _count(
    context: WorkerContext, layers: dict, meshes: tuple, d_model: int, d_ff: int, tokens: int
) -> Rows:
    rows = []
    for x, y in meshes:
        mesh = DeviceMesh("cpu", torch.arange(x * y).view(x, y), mesh_dim_names=("x", "y"))
        if context.rank < x * y:
            torch.manual_seed(0)
            full = SwiGLU(d_model, d_ff, dtype=torch.bfloat16)
            mine = context.rank // y  # of the shares of the tokens
            shares = torch.randn(2, x, tokens // x, d_model, dtype=torch.bfloat16)[:, mine]
            for name, make_layer in layers.items():
                layer = make_layer(deepcopy(full), mesh)
                key = {"layer": name, "X": x, "Y": y, "rank": context.rank}
                rows += (
                    [key | row for row in _passes(layer, full, *shares)]
                    if layer is not None
                    else []
                )
    return rows


def _passes(layer: nn.Module, full: SwiGLU, inputs: Tensor, gradient: Tensor) -> Rows:
    mine, whole = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    with watch_collectives(as_rings=True) as sent:
        output = layer(mine)
        in_forward = len(sent)
        output.backward(gradient)
        getattr(layer, "finish_gradient_synchronization", lambda: None)()
    expected = full(whole)
    expected.backward(gradient)
    error = max(_relative(output, expected), _relative(mine.grad, whole.grad))
    return [
        {"pass": "forward" if number < in_forward else "backward", "collective": one.collective}
        | {"ranks": one.ranks, "sent_bytes": one.sent_bytes, "error": error}
        for number, one in enumerate(sent)
    ]


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected).float().norm() / expected.float().norm()
    return difference.item() if not difference.isnan() else math.inf
