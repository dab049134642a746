"""Fully sharded data parallelism: each rank keeps its rows of every weight, and gathers the others' to use.

The order of forward is noted in the first pass. From then on, whoever begins to compute finds its weights
there, as they were asked for while the one or two before it computed; in backward likewise, in the reverse
order. Two things bound the memory: a unit is freed when it is done, in forward and in backward, and no more
than `prefetch` units are gathered ahead of use.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves

from cs336_systems.functional import at_least_float32
from cs336_systems.parallel.ddp import DataParallel, average_flat
from cs336_systems.parallel.fsdp_units import Lane, Reduction, Unit

Types = Sequence[type[nn.Module] | str]
# Where a parameter is: the module whose forward needs it, the module that holds it, and its name there.
_Place = tuple[nn.Module, nn.Module, str]


class FSDP(DataParallel):
    """Parameters, gradients and optimizer state sharded over the ranks (ZeRO 3, Rajbhandari et al. 2020).

    Wrapping gives every rank rank 0's values, and then leaves it its rows of every parameter of the modules
    of `shard_types`; the rest (norms) stays whole on all ranks. `parameters()` are then these shards, and any
    optimizer updates them, made before or after wrapping. Whole weights exist while their unit computes: all
    that is in a module of `unit_types`, or else of one module of `shard_types`. Modules that share a weight
    are one unit.

    All ranks have to run the same modules in the same order; up to the end of the first step that is checked
    before every message. A unit's module must be called (a method of it, or a part of it, does not gather the
    whole), and what it hands on must be its result.

    Several backward passes may precede `finish_gradient_synchronization()`. Each reduces, and the shards add
    up in the dtype of the parameters. Under `no_sync()` nothing is reduced: whole gradients stay on this rank
    and add up in compute_dtype. To give up passes that are not finished, call `zero_grad()` of the wrapper:
    an optimizer's knows only the shards.

    Args:
        compute_dtype: to which weights are cast before they are gathered, and floating-point arguments of
            their modules. Gradients are reduced in it. Shards and their gradients keep the dtype that the
            module's parameters have.
        shard_types: modules whose parameters are sharded: classes, or their names, which are ours, PyTorch's
            and the course's alike.
        unit_types: modules that are gathered as one, likewise; () gathers each weight on its own.
        prefetch: how many units are gathered ahead of use, 0, 1 or 2; of larger units, in backward at most 1.

    Raises:
        RuntimeError: there is no process group.
        ValueError: an argument is not allowed, there is one rank only, nothing can be sharded or trained,
            parameters of several devices or dtypes would be sharded, or the ranks disagree. On every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        shard_types: Types = ("Linear", "Embedding"),
        *,
        unit_types: Types = (),
        prefetch: int = 2,
    ):
        if compute_dtype is not None and not getattr(compute_dtype, "is_floating_point", False):
            raise ValueError(f"compute_dtype is {compute_dtype!r}; allowed: None, or a floating-point dtype")
        if prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch is {prefetch!r}; allowed: 0, 1 or 2")
        self._compute_dtype, self._ahead = compute_dtype, prefetch
        self._shard_types, self._unit_types = _names(shard_types), _names(unit_types)
        super().__init__(module)
        device = self._trainable[0].device
        lanes = Lane(device, self._backend), Lane(device, self._backend)
        groups = group_by_module(self._sharded)
        self._units = [Unit(places, compute_dtype, lanes) for _, places in groups]
        self._indices = {parameter: index for index, parameter in enumerate(self._trainable)}
        self._replicated = [n for n, weight in enumerate(self._trainable) if weight not in self._sharded]
        # In backward, gradients take the memory of the second block ahead, and it computes for longer.
        self._ahead_in_backward = min(prefetch, 1) if self._unit_types else prefetch
        self._gathered: dict[Unit, None] = {}
        self._reductions: deque[Reduction] = deque()
        self._order: list[Unit] = []  # in which forward uses them
        self._positions: dict[nn.Module, int] = {}  # in that order
        self._end_is_announced = self._has_agreed = False
        for unit, (modules, _) in zip(self._units, groups, strict=True):
            self._add_hooks(unit, modules)

    def _description(self) -> list[str]:
        settings = f"compute_dtype {self._compute_dtype}, prefetch {self._ahead}, "
        return [*super()._description(), settings + f"{self._shard_types} in {self._unit_types}"]

    def _check_module(self) -> None:
        super()._check_module()
        if (world_size := dist.get_world_size()) < 2:
            raise ValueError(
                f"the number of ranks is {world_size}; allowed: 2 or more, which share the weights"
            )
        name, self._sharded = type(self.module).__name__, self._places_to_shard()
        if not self._sharded:
            types = " or ".join(self._shard_types)
            raise ValueError(f"{name} has nothing to shard; allowed: a module with a parameter in a {types}")
        devices = sorted({str(parameter.device) for parameter in self.module.parameters()})
        if len(devices) > 1:
            raise ValueError(f"the parameters of {name} are on {' and '.join(devices)}; allowed: one device")
        dtypes = {parameter.dtype for parameter in self._sharded}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            given = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(f"the weights of {name} are {given}; allowed: one floating-point dtype")

    def _places_to_shard(self) -> dict[nn.Parameter, list[_Place]]:
        """Every parameter to shard, with all its places."""
        found: dict[nn.Parameter, dict[_Place, None]] = {}  # the places as an ordered set
        sharded = set()

        def walk(module: nn.Module, unit: nn.Module | None) -> None:
            # torch.compile(block) holds the block, and is what is called.
            inner = getattr(module, "_orig_mod", module)
            if unit is None or getattr(unit, "_orig_mod", None) is not module:
                unit = module if _is_one_of(inner, self._unit_types) else unit
            needs = module if unit is None else unit
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() > 0:
                    found.setdefault(parameter, {})[needs, module, name] = None
                    if _is_one_of(module, self._shard_types):
                        sharded.add(parameter)
            for child in module.children():
                walk(child, unit)

        walk(self.module, None)
        return {parameter: list(places) for parameter, places in found.items() if parameter in sharded}

    def _add_hooks(self, unit: Unit, modules: list[nn.Module]) -> None:
        # torch.compile leaves these calls as they are.
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))
        for module in modules:
            module.register_forward_pre_hook(partial(before, unit), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(after, unit), always_call=True)
        this = weakref.ref(self)  # Python cannot collect a cycle through a tensor's hooks
        position = self._units.index(unit)
        for number in unit.trainable:
            weight = unit.weights[number].whole
            weight.register_post_accumulate_grad_hook(partial(_after_accumulation, this, position, number))

    # These run for every unit in every pass, and a training step in 16 bits may wait for Python.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_autograd_node() is None:  # else backward computes it once more
            self._free_all()  # what an earlier pass left gathered is stale after the optimizer's step
            self._end_is_announced = False
        return self.module(*args, **kwargs)

    def _before_forward(
        self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        unit.users += 1
        following: Sequence[Unit] = ()
        if torch._C._current_autograd_node() is None:  # else backward computes it once more
            position = self._positions.setdefault(module, len(self._order))
            if position == len(self._order):
                self._order.append(unit)
            following = self._order[position + 1 : position + 1 + self._ahead]
        self._collect(unit, following)
        unit.show_whole()
        if self._compute_dtype is not None:
            args, kwargs = _cast(args, self._compute_dtype), _cast(kwargs, self._compute_dtype)
        if len(unit.trainable) < len(unit.weights) and torch.is_grad_enabled():
            # No gradient tells when a frozen weight is done: those of the arguments do.
            inputs = _with_gradient((args, kwargs))
            if inputs:
                register_multi_grad_hook(inputs, lambda _: self._backward_is_done_with(unit))
        return args, kwargs

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: Any) -> None:
        unit.users -= 1
        if unit.users:
            return
        unit.show_shards()
        outputs = _with_gradient(output)
        if torch.is_grad_enabled():
            position = self._positions.get(module, 0)
            for tensor in outputs:
                tensor.register_hook(lambda _: self._before_backward(unit, position))
        if unit.is_in_backward or not unit.is_gathered:
            return
        # Backward begins with the last unit, so that one stays. In the first pass nobody knows which it is.
        is_last = self._has_agreed and unit is self._order[-1] and torch._C._current_autograd_node() is None
        if not (is_last and outputs):
            self._free(unit)

    def _before_backward(self, unit: Unit, position: int) -> None:
        if unit.is_in_backward and unit.is_gathered:
            return
        self._announce_end()
        self._collect(unit, self._order[max(position - self._ahead_in_backward, 0) : position][::-1])
        unit.is_in_backward = True

    def _collect(self, unit: Unit, following: Sequence[Unit]) -> None:
        for other in (unit, *following):
            if not other.is_gathered:
                self._agree("gather", other)
                other.start_gather()
                self._gathered[other] = None
        unit.wait_for_gather()

    def _gradient_is_ready(self, unit: Unit, number: int) -> None:
        self._announce_end()
        unit.ready.add(number)
        if len(unit.ready) < len(unit.trainable):
            return
        unit.ready.clear()
        if len(unit.trainable) == len(unit.weights):
            self._backward_is_done_with(unit)
        if self._synchronizes:
            self._start_reduction(unit)

    def _backward_is_done_with(self, unit: Unit) -> None:
        if unit.is_gathered and not unit.users:
            self._free(unit)

    def _start_reduction(self, unit: Unit) -> None:
        self._agree("reduce", unit)
        for number in unit.trainable:
            weight = unit.weights[number]
            if weight.whole.grad is not None:
                self._unused.discard(self._indices[weight.parameter])
            elif weight.parameter.grad is None:
                self._unused.add(self._indices[weight.parameter])
        self._wait_for_reductions(max(self._ahead_in_backward, 1) - 1)  # or whole gradients would pile up
        self._reductions.append(unit.start_reduction())

    def _wait_for_reductions(self, leave: int = 0) -> None:
        while len(self._reductions) > leave:
            self._reductions.popleft().wait()

    def _announce_end(self) -> None:
        if not self._end_is_announced:
            self._end_is_announced = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._end_is_announced = False
        # Inside a node it was only a part of the pass, as checkpoint(use_reentrant=True) runs them.
        if torch._C._current_autograd_node() is None:
            self._free_all()

    def _free(self, unit: Unit) -> None:
        unit.free()
        del self._gathered[unit]

    def _free_all(self) -> None:
        for unit in list(self._gathered):
            self._free(unit)

    def _average_gradients(self) -> None:
        self._agree("finish")
        for unit in self._units:
            if unit.has_gradients:  # of passes under no_sync(), or of some of its weights
                self._start_reduction(unit)
        self._agree("average what is not sharded")
        average_flat([self._gradient(index) for index in self._replicated], self._backend)
        self._wait_for_reductions()
        self._free_all()
        self._has_agreed = True
        for unit in self._units:
            for weight in unit.weights:
                if weight.parameter.requires_grad != weight.whole.requires_grad:
                    raise RuntimeError(
                        "a weight was frozen or unfrozen since it was wrapped; do so, then wrap"
                    )

    def _agree(self, what: str, unit: Unit | None = None) -> None:
        """In the first step, compare with the other ranks before a message that they may not expect."""
        if self._has_agreed:
            return
        mine = what if unit is None else f"{what} unit {self._units.index(unit)}"
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ValueError(
                    f"the ranks part: rank 0 is to {everyone[0]} and rank {rank} to {other}; allowed: the "
                    "same modules in the same order on all ranks"
                )

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        """What `to`, `half`, `cuda` and the like call."""
        for shard in self.full_shapes():
            changed = change(shard.detach()[:0])
            if (changed.dtype, changed.device) != (shard.dtype, shard.device):
                raise RuntimeError(
                    f"a wrapped module is to become {changed.dtype} on {changed.device}; allowed: as it was "
                    f"wrapped, {shard.dtype} on {shard.device}; change the module, then wrap it"
                )
        return super()._apply(change, recurse)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> NamedTuple:
        """As of every module, of this rank's shards; a tensor that is assigned would be no shard."""
        if assign:
            raise ValueError("assign is True; allowed: False, which copies into the shards")
        return super().load_state_dict(state_dict, strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module, and forget the gradients that are not yet in the shards."""
        self._wait_for_reductions()
        for unit in self._units:
            for weight in unit.weights:
                weight.whole.grad = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the module that was wrapped; all ranks have to ask for it.

        A tied weight has all its names. The tensors are copies in the dtype of the shards; parameters that
        are not sharded are returned as they are.
        """
        whole = {
            weight.parameter: tensor
            for unit in self._units
            for weight, tensor in zip(unit.weights, unit.gather_full(), strict=True)
        }
        return {
            name.replace("_orig_mod.", ""): whole.get(parameter, parameter.detach())
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }

    def full_shapes(self) -> dict[nn.Parameter, torch.Size]:
        """Of every parameter that is sharded, the shape of the whole."""
        return {weight.parameter: weight.whole.shape for unit in self._units for weight in unit.weights}

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most max_norm; returns what it was.

        Call it after `finish_gradient_synchronization()`, on all ranks.
        """
        with_gradient = [parameter for parameter in self._trainable if parameter.grad is not None]
        replicated = {self._trainable[index] for index in self._replicated}
        whole = at_least_float32(get_total_norm([p.grad for p in with_gradient if p in replicated]))
        shards = at_least_float32(get_total_norm([p.grad for p in with_gradient if p not in replicated]))
        squared = shards.to(self._trainable[0].device) ** 2  # of no gradients it is a number on the CPU
        dist.all_reduce(squared)
        total = (squared + whole.to(squared.device) ** 2).sqrt()
        clip_grads_with_norm_(with_gradient, max_norm, total)
        return total


def _after_accumulation(this: weakref.ref, position: int, number: int, _: Tensor) -> None:
    if wrapper := this():
        wrapper._gradient_is_ready(wrapper._units[position], number)


def group_by_module(
    places: dict[nn.Parameter, list[_Place]],
) -> list[tuple[list[nn.Module], dict[nn.Parameter, list[tuple[nn.Module, str]]]]]:
    """Parameters that are needed together: those of one module, and of all modules that share one of them.

    Returns:
        For each group the modules that need it, and of its parameters the modules that hold them, with names.
    """
    groups: dict[nn.Module, tuple[dict[nn.Module, None], dict]] = {}  # the modules as an ordered set
    for parameter, found in places.items():
        modules, held = {}, {}
        for user, *_ in found:
            before = groups.get(user, ({user: None}, {}))
            modules |= before[0]
            held |= before[1]
        held[parameter] = list(dict.fromkeys((holder, name) for _, holder, name in found))
        groups |= dict.fromkeys(modules, (modules, held))
    return [
        (list(modules), held) for modules, held in {id(group): group for group in groups.values()}.values()
    ]


def _names(types: Types) -> tuple[str, ...]:
    return tuple(getattr(kind, "__name__", kind) for kind in types)


def _is_one_of(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _with_gradient(value: Any) -> list[Tensor]:
    """The tensors in arguments or results of a module that backward comes through."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in arguments, in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(part, dtype) for part in value)
    return value
