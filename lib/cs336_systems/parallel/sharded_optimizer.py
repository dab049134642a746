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
from torch.optim import Optimizer

from cs336_systems.parallel import guards
from cs336_systems.parallel.ddp import ALL_GATHER
from cs336_systems.parallel.shards import BucketMemory, Segments, allocate, partition_tensors

_PLAIN = (bool, int, float, str, tuple, list, type(None))


class ShardedOptimizer(Optimizer):
    """Any optimizer that updates each parameter by itself, its states spread over the ranks.

    The weights are bitwise those that `optimizer_cls(params, **kwargs)` alone would give. Shards are whole
    parameters, balanced by bytes. The parameters become views of buckets (see `shards`); their values,
    identity and gradients stay. A bucket's shard is updated, then the bucket is all-gathered while the next
    one is updated; `step` waits for all of them, on a GPU without blocking the CPU.

    Call `step` and `add_param_group` on all ranks, with the same gradients and groups. A parameter that was
    frozen when it was given has no owner. Saving one parameter with torch.save saves its bucket.

    Args:
        params: parameters, (name, parameter) pairs, or groups of them as dictionaries with own settings.
        bucket_size_mb: the most that travels in one message, in MB of 2**20 bytes, all ranks' parts together.
        kwargs: for `optimizer_cls`.

    Raises:
        RuntimeError: there is no process group.
        ValueError, TypeError: anything else is wrong, or the ranks disagree. Raised on every rank.
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
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._bucket_size_mb = bucket_size_mb
        self._make = lambda groups: optimizer_cls(groups, **kwargs)
        self._optimizer: Optimizer | None = None  # of this rank's shard
        self._places: dict[Tensor, tuple[int, int]] = {}  # of each parameter, its owner and its address
        # With each bucket what this rank updates in it, by the number of the group.
        self._buckets: list[tuple[BucketMemory, dict[int, list[Tensor]]]] = []
        self._frozen: list[Tensor] = []
        self.param_groups = []

        def add() -> None:
            _check_arguments(optimizer_cls, bucket_size_mb, self._world_size)
            super(ShardedOptimizer, self).__init__(params, {})

        name = getattr(optimizer_cls, "__name__", optimizer_cls)
        self._on_all_ranks(add, [f"{name} {_plain(kwargs)}", f"buckets of {bucket_size_mb} MB"])

    __reduce_ex__ = guards.refuse_copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Partition another group's parameters as well; the shards so far stay as they are."""
        add = partial(super().add_param_group, param_group)
        if self._optimizer is None:  # called by Optimizer.__init__
            add()
        else:
            self._on_all_ranks(add, [f"group {len(self.param_groups)}"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard and get the others'; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_addresses()
        updated: dict[int, dict[str, Any]] = {}
        messages, all_gather = [], getattr(dist, ALL_GATHER)
        for memory, shard in self._buckets:
            if shard:
                # Each bucket starts from the settings before the step, for some optimizers count in them.
                groups = [self.param_groups[number] | {"params": part} for number, part in shard.items()]
                self._optimizer.param_groups = groups
                self._optimizer.step()
                updated |= zip(shard, groups, strict=True)
            own = memory.segments[self._rank]
            messages.append(all_gather(memory.whole, own, async_op=True))
        idle = {n: g | {"params": []} for n, g in enumerate(self.param_groups) if n not in updated}
        if idle:  # their settings have to follow those on other ranks
            self._optimizer.param_groups = list(idle.values())
            self._optimizer.step()
        for message in messages:
            message.wait()
        for number, group in (updated | idle).items():
            self.param_groups[number].update(_settings(group))
        return loss

    def owner(self, parameter: Tensor) -> int:
        """The rank that updates a parameter; ValueError if it has none."""
        if parameter not in self._places:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has no owner; allowed: those given, and "
                "trainable when given"
            )
        return self._places[parameter][0]

    def state_dict(self) -> dict[str, Any]:
        """All groups, and the states of this rank's shard."""
        return super().state_dict() | {"shard": [self._rank, self._world_size]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict()` gave on this rank; ValueError for another's, or of other groups."""
        if state_dict.get("shard") != [self._rank, self._world_size]:
            raise ValueError(
                f"the state is of shard {state_dict.get('shard')} (rank, ranks); allowed: "
                f"{[self._rank, self._world_size]}, what state_dict() gave on this rank"
            )
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        # Its class may have to convert what an older version of it has saved.
        self._optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def _on_all_ranks(self, add: Callable[[], None], described: list[str]) -> None:
        """Take new groups in if that succeeds on every rank and all take the same, else fail on all."""
        count, partition, failure = len(self.param_groups), [], None
        try:
            add()
            partition = self._partition(self.param_groups[count:])
            for group in self.param_groups[count:]:
                described = [*described, f"group {_plain(_settings(group))}"]
                described += map(guards.describe, group["params"])
        except Exception as error:
            failure, described = error, [f"{type(error).__name__}: {error}"]
        try:
            guards.check_ranks_agree(described)
            if failure:
                raise failure
        except Exception:
            del self.param_groups[count:]
            raise
        self._lay_out(partition)

    def _partition(self, groups: list[dict[str, Any]]) -> list[Segments]:
        """Partition the trainable parameters of new groups; this rank's optimizer gets its part of each."""
        _check_parameters([p for group in self.param_groups for p in group["params"]])
        trainable = [p for group in groups for p in group["params"] if p.requires_grad]
        partition = partition_tensors(trainable, self._world_size, self._bucket_size_mb)
        own = {parameter for segments in partition for parameter in segments[self._rank]}
        parts = [_settings(group) | {"params": [p for p in group["params"] if p in own]} for group in groups]
        if self._optimizer is None:
            self._optimizer = self._make(parts)
            self.defaults, self.state = self._optimizer.defaults, self._optimizer.state
        else:
            self._optimizer.param_groups = []  # it may be our list, and `step` brings what it needs
            self._optimizer.add_param_group(*parts)
        for group, part in zip(groups, parts, strict=True):
            group.update(_settings(part))
        return partition

    def _check_addresses(self) -> None:
        """Raise if parameters were moved or unfrozen since construction: they would not be updated."""
        guards.check_still_frozen(self._frozen)
        if any(parameter.data_ptr() != address for parameter, (_, address) in self._places.items()):
            raise RuntimeError(
                "a parameter is no longer where the optimizer has put it; allowed: module.to(...) and "
                "load_state_dict(assign=True) before the optimizer is made"
            )

    @torch.no_grad()
    def _lay_out(self, partition: list[Segments]) -> None:
        """Move the parameters of new groups into their buckets."""
        number_of = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        for segments in partition:
            (memory,) = allocate([segments])  # one at a time: the parameters leave their old memory
            for parameter, view in memory.views.items():
                parameter.data = view.copy_(parameter)
            shard: dict[int, list[Tensor]] = {}
            for parameter in segments[self._rank]:
                shard.setdefault(number_of[parameter], []).append(parameter)
            self._buckets.append((memory, shard))
            self._places |= {p: (rank, p.data_ptr()) for rank, part in enumerate(segments) for p in part}
        self._frozen = [p for p in number_of if p not in self._places]


def _check_arguments(optimizer_cls: Any, bucket_size_mb: Any, world_size: int) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(f"optimizer_cls is {optimizer_cls!r}; allowed: a subclass of torch.optim.Optimizer")
    if guards.needs_closure(optimizer_cls):
        raise ValueError(
            f"optimizer_cls is {optimizer_cls.__name__}, whose step needs a closure; allowed: optimizers "
            "that update each parameter by itself"
        )
    guards.check_bucket_size(bucket_size_mb)
    if world_size == 1:
        raise ValueError(
            f"the world size is 1; allowed: 2 or more (one process takes {optimizer_cls.__name__} itself)"
        )


def _check_parameters(parameters: list[Tensor]) -> None:
    guards.check_have_values("a parameter group", parameters)
    guards.check_one_device("a parameter group", parameters)
    starts = [parameter.data_ptr() for parameter in parameters if parameter.numel()]
    if len(set(starts)) < len(starts):
        raise ValueError("two parameters share their memory; allowed: each once, tied weights too")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """For comparing with other ranks: of what is no plain value, the type."""
    return {name: value if isinstance(value, _PLAIN) else type(value) for name, value in settings.items()}
