"""An optimizer whose states are spread over the ranks (ZeRO stage 1, Rajbhandari et al. 2020, section 5.1).

Every rank holds all parameters and the mean of their gradients, as data parallelism leaves them. It keeps the
optimizer's states of its own shard of the parameters, updates that, and gets the rest from its owners:

    model = BucketedDDP(module, bucket_size_mb=25)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from cs336_systems.parallel import guards
from cs336_systems.parallel.ddp import ALL_GATHER
from cs336_systems.parallel.shards import BucketMemory, allocate, partition_tensors


class ShardedOptimizer(Optimizer):
    """Any optimizer that updates each parameter by itself, its states spread over the ranks.

    The weights are bitwise those that `optimizer_cls(params, **kwargs)` alone would give. Shards are whole
    parameters, balanced by bytes. The parameters become views of buckets (see `shards`); their values,
    identity and gradients stay. A bucket's shard is updated, then the bucket is all-gathered while the next
    one is updated; `step` waits for all of them, on a GPU without blocking the CPU.

    Call `step` and `add_param_group` on all ranks, with the same gradients and groups. A parameter that was
    frozen when it was given has no owner, and is never updated. Saving one parameter with torch.save saves
    its bucket.

    Args:
        params: parameters, (name, parameter) pairs, or groups of them as dictionaries with own settings.
        bucket_size_mb: the most that travels in one message, in MB of 2**20 bytes, all ranks' parts together.
        kwargs: for `optimizer_cls`.

    Raises:
        RuntimeError: there is no process group.
        TypeError, ValueError: an argument is not allowed. ValueError: the ranks disagree, on every rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        bucket_size_mb: float = 256,
        **kwargs: Any,
    ):
        guards.check_process_group(self)
        guards.check_bucket_size(bucket_size_mb)
        _check_class(optimizer_cls)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._bucket_size_mb = bucket_size_mb
        self._make = partial(optimizer_cls, **kwargs)
        # Each with the optimizer of this rank's segment.
        self._buckets: list[tuple[BucketMemory, Optimizer]] = []
        self._owners: dict[Tensor, int] = {}
        # Where the parameters are since they lie in buckets.
        self._addresses: dict[Tensor, int] = {}
        # The whole one knows the settings of the groups. `super().__init__` adds them one by one, before
        # `_is_made`; they are laid out together.
        whole = self._make(params)
        self._is_made = False
        super().__init__(whole.param_groups, whole.defaults)
        self._is_made = True
        self._lay_out(self.param_groups)

    __reduce_ex__ = guards.refuse_copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Partition another group's parameters as well; the shards so far stay as they are."""
        super().add_param_group(param_group)
        if self._is_made:
            self._lay_out(self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard and get the others'; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.data_ptr() != address for p, address in self._addresses.items()):
            raise RuntimeError(
                "a parameter is no longer where the optimizer has put it; allowed: module.to(...) and "
                "load_state_dict(assign=True) before the optimizer is made"
            )
        all_gather = getattr(dist, ALL_GATHER)
        messages = []
        for memory, optimizer in self._buckets:
            _copy_settings(self.param_groups, optimizer.param_groups)
            optimizer.step()
            messages.append(all_gather(memory.whole, memory.segments[self._rank], async_op=True))
        for message in messages:
            message.wait()
        # Some optimizers count in their settings. The newest bucket has all groups; without a trainable
        # parameter there is no bucket, and [-1:] is empty.
        for _, optimizer in self._buckets[-1:]:
            _copy_settings(optimizer.param_groups, self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """All groups, and the states of this rank's shard."""
        return super().state_dict() | {"shard": guards.place(), "owners": self._shapes_and_owners()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict()` gave on this rank; ValueError for another's, or of other groups."""
        guards.check_place(state_dict.get("shard"))
        if state_dict.get("owners") != self._shapes_and_owners():
            raise ValueError(
                "in the state other ranks own the parameters; allowed: the same parameters, groups in the "
                "order in which they were added, bucket_size_mb"
            )
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        # Loading has made a new dictionary: as in `_lay_out`, all have the same.
        for _, optimizer in self._buckets:
            optimizer.state = self.state

    def _shapes_and_owners(self) -> list[list]:
        """Of each parameter, frozen ones too."""
        parameters = (p for group in self.param_groups for p in group["params"])
        return [[list(p.shape), self._owners.get(p)] for p in parameters]

    @torch.no_grad()
    def _lay_out(self, groups: list[dict[str, Any]]) -> None:
        """Move the parameters of new groups into buckets, each with an optimizer that has all groups."""
        parameters = [p for group in groups for p in group["params"]]
        guards.check_have_values("a parameter group", parameters)
        if any(hasattr(p, "_is_shard") for p in parameters):
            raise ValueError("a parameter is a rank's part of a weight; allowed: whole weights")
        kind = self._make.func.__name__
        guards.check_ranks_agree([kind] + list(map(guards.describe, parameters)))
        trainable = [p for p in parameters if p.requires_grad]
        for segments in partition_tensors(trainable, self._world_size, self._bucket_size_mb):
            shard = set(segments[self._rank])
            groups_of_shard = [
                _settings(group) | {"params": [p for p in group["params"] if p in shard]}
                for group in self.param_groups
            ]
            optimizer = self._make(groups_of_shard)
            # One dictionary of states for this optimizer and those of all buckets.
            self.state.update(optimizer.state)
            optimizer.state = self.state
            # One at a time: the parameters leave their old memory.
            (memory,) = allocate([segments])
            for parameter, view in memory.views.items():
                parameter.data = view.copy_(parameter)
                self._addresses[parameter] = parameter.data_ptr()
            for rank, segment in enumerate(segments):
                self._owners |= dict.fromkeys(segment, rank)
            self._buckets.append((memory, optimizer))


def _check_class(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"optimizer_cls is {kind!r}; allowed: a subclass of torch.optim.Optimizer")
    if issubclass(kind, LBFGS):
        raise ValueError(
            f"optimizer_cls is {kind.__name__}, which looks at all parameters at once; allowed: optimizers "
            "that update each by itself"
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _copy_settings(groups: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    # An older bucket does not have the newest groups.
    for group, copy in zip(groups, to, strict=False):
        copy.update(_settings(group))
