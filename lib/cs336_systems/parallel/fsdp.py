"""Fully sharded data parallelism: each rank keeps its rows of every weight, and gathers the others' to use.

The order of forward is noted in the first pass. From then on, a parameter group is gathered while the one or
two before it compute; in backward likewise, in the reverse order. A group is freed when it is done, in both.
In backward a hook on the results of a module starts its gather early. If a result takes another way: autograd
keeps a note of a gathered weight, and reading the note gathers the weight again (`_pack`, `_unpack`).
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
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336_systems.functional import at_least_float32
from cs336_systems.parallel.ddp import DataParallel, average_flat, check_ranks_agree, not_finite
from cs336_systems.parallel.elementwise import refuse_other_optimizers
from cs336_systems.parallel.parameter_group import CommunicationStream, ParameterGroup, Reduction

Types = Sequence[type[nn.Module] | str]
# Where a parameter is: the module whose forward needs it, the module that holds it, and its name there.
_Home = tuple[nn.Module, nn.Module, str]


class _Saved(NamedTuple):
    """What autograd keeps of a tensor that is saved for backward in the forward of a group."""

    tensor: Any
    version: int = 0  # of the tensor; of the shards, if it is a weight
    group: ParameterGroup | None = None  # whose weight it is
    position: int = 0  # in the order of forward
    dtype: torch.dtype | None = None  # of a copy that autocast made of the weight
    unpack: Callable[[Any], Tensor] | None = None  # of hooks around ours, as of activation checkpointing


class _Hook(partial):
    __reduce_ex__ = ParameterGroup.__reduce_ex__  # refuses: a module with hooks cannot be copied or pickled


class FSDP(DataParallel):
    """Parameters, gradients and optimizer state sharded over the ranks (ZeRO 3, Rajbhandari et al. 2020).

    Wrapping gives every rank rank 0's values, and then leaves it its rows of every parameter of the modules
    of `shard_types`; the rest (norms) stays whole. `parameters()` are then these shards, for an optimizer,
    made before or after, that updates each element by itself (see `elementwise`). Whole weights exist while
    their group computes: all that is in a module of `unit_types`, or else in one module of `shard_types`, and
    in modules that share a weight with it. Under autocast a copy of a frozen weight is kept for backward.

    All ranks have to run the same modules in the same order; in the first step that is checked. Each backward
    pass before `finish_gradient_synchronization()` reduces, and the shards add up in their dtype. Under
    `no_sync()` whole gradients stay on this rank and add up in compute_dtype. To give up unfinished passes,
    call `zero_grad()` of the wrapper: an optimizer's knows only the shards. An infinity or a NaN in a
    gradient on one rank becomes a NaN on all, so that a GradScaler skips the step on all.

    Args:
        compute_dtype: to which weights are cast before they are gathered, and floating-point arguments of
            their modules. Gradients are reduced in it. Shards and their gradients keep the dtype that the
            module's parameters have.
        shard_types: modules whose parameters are sharded: classes, or their names, which are ours, PyTorch's
            and the course's alike. A class that is derived from one of them is another.
        unit_types: modules that are gathered as one, or derived from them; () gathers each weight on its own.
        prefetch: how many groups are gathered ahead of use, 0, 1 or 2; of larger ones, in backward at most 1.

    Raises:
        RuntimeError: there is no process group. In forward, a weight is used outside its module; in backward,
            it was written to since forward, or the pass is to be differentiated itself (create_graph).
        ValueError: an argument is not allowed, there is one rank, nothing to shard or train, several devices
            or dtypes to shard, a hook on a parameter to shard, or the ranks disagree. On every rank.
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
        streams = CommunicationStream(device, self._backend), CommunicationStream(device, self._backend)
        names = {other: name or type(module).__name__ for name, other in module.named_modules()}
        groups = group_by_module(self._sharded)
        self._groups = [
            ParameterGroup(" and ".join(names[user] for user in users), homes, compute_dtype, streams)
            for users, homes in groups
        ]
        self._indices = {parameter: index for index, parameter in enumerate(self._trainable)}
        self._replicated = [n for n, weight in enumerate(self._trainable) if weight not in self._sharded]
        # In backward, gradients take the memory of the second block ahead, and it computes for longer.
        self._ahead_in_backward = min(prefetch, 1) if self._unit_types else prefetch
        self._gathered: dict[ParameterGroup, None] = {}
        self._reductions: deque[Reduction] = deque()
        self._order: list[ParameterGroup] = []  # in which forward uses them
        self._positions: dict[nn.Module, int] = {}  # in that order
        self._caches_casts: list[bool] = []  # what to restore, of the modules whose forward is under way
        self._has_agreed = self._is_in_forward = False
        for group, (modules, _) in zip(self._groups, groups, strict=True):
            self._add_hooks(group, modules)
        before, after = map(torch.compiler.disable, (self._before_all, self._after_all))
        module.register_forward_pre_hook(_Hook(before), prepend=True)
        module.register_forward_hook(_Hook(after), always_call=True)
        refuse_other_optimizers(self._sharded)

    __reduce_ex__ = ParameterGroup.__reduce_ex__  # refuses

    def _description(self) -> list[str]:
        settings = f"compute_dtype {self._compute_dtype}, prefetch {self._ahead}, "
        return [*super()._description(), settings + f"{self._shard_types} in {self._unit_types}"]

    def _check_module(self) -> None:
        super()._check_module()
        if (world_size := dist.get_world_size()) < 2:
            raise ValueError(f"the number of ranks is {world_size}; allowed: 2 or more, to share the weights")
        name, self._sharded = type(self.module).__name__, self._homes_to_shard()
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
        self._check_hooks()

    def _check_hooks(self) -> None:
        if any(shard._backward_hooks or shard._post_accumulate_grad_hooks for shard in self._sharded):
            raise ValueError(
                "a parameter has a hook that FSDP would not call, as autograd knows only the whole weight; "
                "allowed: parameters without hooks"
            )

    def _homes_to_shard(self) -> dict[nn.Parameter, list[_Home]]:
        """Every parameter to shard, with all its homes."""
        found: dict[nn.Parameter, dict[_Home, None]] = {}  # the homes as an ordered set
        sharded = set()

        def walk(module: nn.Module, unit: nn.Module | None) -> None:
            # torch.compile(block) holds the block, and is what is called.
            inner = getattr(module, "_orig_mod", module)
            if unit is None or getattr(unit, "_orig_mod", None) is not module:
                kinds = {kind.__name__ for kind in type(inner).__mro__}
                unit = unit if kinds.isdisjoint(self._unit_types) else module
            needs = module if unit is None else unit
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() > 0:
                    found.setdefault(parameter, {})[needs, module, name] = None
                    if type(module).__name__ in self._shard_types:
                        sharded.add(parameter)
            for child in module.children():
                walk(child, unit)

        walk(self.module, None)
        return {parameter: list(homes) for parameter, homes in found.items() if parameter in sharded}

    def _add_hooks(self, group: ParameterGroup, modules: list[nn.Module]) -> None:
        # torch.compile leaves these calls as they are.
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))
        for module in modules:
            module.register_forward_pre_hook(_Hook(before, group), prepend=True, with_kwargs=True)
            module.register_forward_hook(_Hook(after, group), always_call=True)
        this = weakref.ref(self)  # Python cannot collect a cycle through a tensor's hooks
        position = self._groups.index(group)
        for number in group.trainable:
            weight = group.weights[number].whole
            weight.register_post_accumulate_grad_hook(partial(_after_accumulation, this, position, number))

    def _before_all(self, module: nn.Module, args: tuple) -> None:
        if torch._C._current_autograd_node() is None:  # else backward computes it once more
            self._free_all()  # what an earlier pass left gathered is stale after the optimizer's step
            self._give_up_failed_pass()
            self._is_in_forward = True
            for group in self._groups:
                group.hide()

    def _after_all(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._is_in_forward and torch._C._current_autograd_node() is None:
            self._is_in_forward = False
            for group in self._groups:
                group.reshard()

    # These run for every group in every pass, and a training step in 16 bits may wait for Python.
    def _before_forward(
        self, group: ParameterGroup, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        group.users += 1
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        casts = torch.is_autocast_enabled(self._trainable[0].device.type)
        torch._C._autograd._push_saved_tensors_default_hooks(partial(self._pack, outer, casts), self._unpack)
        self._caches_casts.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)  # the cache would keep a copy of every whole weight
        following: Sequence[ParameterGroup] = ()
        if torch._C._current_autograd_node() is None:  # else backward computes it once more
            group.position = self._positions.setdefault(module, len(self._order))
            if group.position == len(self._order):
                self._order.append(group)
            following = self._order[group.position + 1 : group.position + 1 + self._ahead]
        self._collect(group, following)
        group.unshard()
        if (dtype := self._compute_dtype) is not None:
            cast = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        if len(group.trainable) < len(group.weights) and torch.is_grad_enabled():
            # No gradient tells when a frozen weight is done: those of the arguments do.
            inputs = _with_gradient((args, kwargs))
            if inputs:
                register_multi_grad_hook(inputs, lambda _: self._backward_is_done_with(group))
        return args, kwargs

    def _after_forward(self, group: ParameterGroup, module: nn.Module, args: tuple, output: Any) -> None:
        group.users -= 1
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_autocast_cache_enabled(self._caches_casts.pop())
        if group.users:
            return
        if not group.is_in_backward:
            group.hide() if self._is_in_forward else group.reshard()
        outputs = _with_gradient(output)
        if torch.is_grad_enabled():
            position = self._positions.get(module, 0)
            for tensor in outputs:
                tensor.register_hook(lambda _: self._before_backward(group, position))
        if group.is_in_backward or not group.is_gathered:
            return
        # Backward begins with the last group, so that one stays. In the first pass nobody knows which it is.
        is_last = self._has_agreed and group is self._order[-1] and torch._C._current_autograd_node() is None
        if not (is_last and outputs):
            self._free(group)

    def _pack(self, outer: tuple[Callable, Callable] | None, casts: bool, tensor: Tensor) -> _Saved:
        try:
            pointer = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a sparse or nested tensor has none
            pointer = 0
        for group in self._gathered:
            if group.pointer == pointer:
                return _Saved(tensor.detach(), group.versions, group, group.position)
        if casts and (cast := self._cast_of_weight(tensor)):
            return cast
        if outer is not None:
            return _Saved(outer[0](tensor), unpack=outer[1])
        return _Saved(tensor.detach(), tensor._version)

    def _cast_of_weight(self, tensor: Tensor) -> _Saved | None:
        """The note for a copy in 16 bits that autocast has made of a whole weight, or for a view of it."""
        node = tensor.grad_fn
        while node is not None and not hasattr(node, "variable"):
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        leaf = getattr(node, "variable", None)
        if leaf is None or leaf.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return None
        for group in self._gathered:
            if group.pointer == leaf.untyped_storage().data_ptr():
                strided = (leaf.detach(), tensor.size(), tensor.stride(), tensor.storage_offset())
                return _Saved(strided, group.versions, group, group.position, tensor.dtype)
        return None

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.unpack is not None:
            return saved.unpack(saved.tensor)
        whole = saved.tensor if saved.dtype is None else saved.tensor[0]
        now = whole._version if saved.group is None else saved.group.versions_now()
        if now != saved.version:
            what = f"a tensor {tuple(whole.shape)}" if saved.group is None else saved.group.name
            raise RuntimeError(
                f"{what}, needed for gradient computation, has been modified by an inplace operation; "
                "allowed: an optimizer's step, or loading, after backward"
            )
        if saved.group is None:
            return whole
        if torch._C._current_graph_task_id() == -1:  # somebody looks at the graph
            return whole
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward pass through {saved.group.name} of an FSDP is to be differentiated; allowed: "
                "create_graph=False, as its weights will be gone (the other wrappers can)"
            )
        self._before_backward(saved.group, saved.position)
        return whole if saved.dtype is None else whole.to(saved.dtype).as_strided(*saved.tensor[1:])

    def _before_backward(self, group: ParameterGroup, position: int) -> None:
        if group.is_in_backward and group.is_gathered:
            return
        self._announce_end()
        self._collect(group, self._order[max(position - self._ahead_in_backward, 0) : position][::-1])
        group.is_in_backward = True
        group.unshard()  # a part of its forward may be computed once more

    def _collect(self, group: ParameterGroup, following: Sequence[ParameterGroup]) -> None:
        for other in (group, *following):
            if other.is_gathered and other.versions != other.versions_now():
                self._free(other)  # it was gathered ahead of an optimizer's step
            if not other.is_gathered:
                self._agree("gather", other)
                other.start_gather()
                self._gathered[other] = None
        group.wait_for_gather()

    def _gradient_is_ready(self, group: ParameterGroup, number: int) -> None:
        self._announce_end()
        group.ready.add(number)
        if len(group.ready) < len(group.trainable):
            return
        group.ready.clear()
        if len(group.trainable) == len(group.weights):
            self._backward_is_done_with(group)
        if self._synchronizes:
            self._start_reduction(group)

    def _backward_is_done_with(self, group: ParameterGroup) -> None:
        if group.is_gathered and not group.users:
            self._free(group)

    def _start_reduction(self, group: ParameterGroup) -> None:
        self._agree("reduce", group)
        for number in group.trainable:
            weight = group.weights[number]
            if weight.whole.grad is not None:
                self._unused.discard(self._indices[weight.parameter])
            elif weight.parameter.grad is None:
                self._unused.add(self._indices[weight.parameter])
        self._wait_for_reductions(max(self._ahead_in_backward, 1) - 1)  # or whole gradients would pile up
        self._reductions.append(group.start_reduction())

    def _wait_for_reductions(self, leave: int = 0) -> None:
        while len(self._reductions) > leave:
            self._reductions.popleft().wait()

    def _backward_ends(self) -> None:
        super()._backward_ends()
        if self._is_over:
            self._free_all()

    def _free(self, group: ParameterGroup) -> None:
        group.free()
        group.hide() if self._is_in_forward else group.reshard()
        del self._gathered[group]

    def _free_all(self) -> None:
        for group in list(self._gathered):
            self._free(group)

    def _average_gradients(self) -> None:
        self._agree("finish")
        for group in self._groups:
            if group.has_gradients:  # of passes under no_sync(), or of some of its weights
                self._start_reduction(group)
        self._agree("average what is not sharded")
        average_flat([self._gradient(index) for index in self._replicated], self._backend)
        self._wait_for_reductions()
        self._free_all()
        self._has_agreed = True
        self._check_hooks()
        weights = [weight for group in self._groups for weight in group.weights]
        if any(shard.requires_grad != whole.requires_grad for shard, whole in weights):
            raise RuntimeError("a weight was frozen or unfrozen since it was wrapped; do so, then wrap")

    def _not_finite(self) -> Tensor | None:
        return not_finite(self._trainable)

    def _spread(self, nan: Tensor) -> None:
        """Without asking the GPU, add NaN to an element of each gradient that is not finite somewhere."""
        gradients = [weight.grad for weight in self._trainable]
        here = [n for n, gradient in enumerate(gradients) if gradient is not None and gradient.numel()]
        elsewhere = list({*range(len(gradients))} - {*here})
        if elsewhere and here:  # this rank has no row of them
            nan[here[0]] += nan[elsewhere].sum()
        if here:
            torch._foreach_add_([gradients[n].view(-1)[:1] for n in here], [nan[n : n + 1] for n in here])

    def _agree(self, what: str, group: ParameterGroup | None = None) -> None:
        """In the first step, compare with the other ranks before a message that they may not expect."""
        if not self._has_agreed:
            check_ranks_agree([what if group is None else f"{what} {group.name}"])

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        """What `to`, `half`, `cuda` and the like call."""
        shard = next(iter(self._sharded)).detach()[:0]
        changed = change(shard)
        if (changed.dtype, changed.device) != (shard.dtype, shard.device):
            raise RuntimeError(
                f"a wrapped module is to become {changed.dtype} on {changed.device}; allowed: as it was "
                f"wrapped, {shard.dtype} on {shard.device}; change the module, then wrap it"
            )
        return super()._apply(change, recurse)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of every module, of this rank's shards; a tensor that is assigned would be no shard."""
        if assign:
            raise ValueError("assign is True; allowed: False, which copies into the shards")
        return super().load_state_dict(state_dict, strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module, and forget the gradients that are not yet in the shards."""
        self._wait_for_reductions()
        self._free_all()
        for group in self._groups:
            for weight in group.weights:
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
            for group in self._groups
            for weight, tensor in zip(group.weights, group.gather_full(), strict=True)
        }
        return {
            name.replace("_orig_mod.", ""): whole.get(parameter, parameter.detach())
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most max_norm; returns what it was.

        Call it after `finish_gradient_synchronization()`, on all ranks.
        """
        with_gradient = [parameter for parameter in self._trainable if parameter.grad is not None]
        norms = [
            at_least_float32(
                get_total_norm([p.grad for p in with_gradient if (p in self._sharded) is sharded])
            )
            for sharded in (True, False)
        ]
        # The norm of no gradients is a number on the CPU.
        squared, of_whole = (norm.to(self._trainable[0].device) ** 2 for norm in norms)
        dist.all_reduce(squared)
        total = (squared + of_whole).sqrt()
        clip_grads_with_norm_(with_gradient, max_norm, total)
        return total


def _after_accumulation(this: weakref.ref, position: int, number: int, _: Tensor) -> None:
    if wrapper := this():
        wrapper._gradient_is_ready(wrapper._groups[position], number)


def group_by_module(
    homes: dict[nn.Parameter, list[_Home]],
) -> list[tuple[list[nn.Module], dict[nn.Parameter, list[tuple[nn.Module, str]]]]]:
    """Parameters that are needed together: those of one module, and of all modules that share one of them.

    Returns:
        For each group the modules that need it, and of its parameters the modules that hold them, with names.
    """
    groups: dict[nn.Module, tuple[dict[nn.Module, None], dict]] = {}  # the modules as an ordered set
    for parameter, found in homes.items():
        modules, held = {}, {}
        for user, *_ in found:
            before = groups.get(user, ({user: None}, {}))
            modules |= before[0]
            held |= before[1]
        held[parameter] = list(dict.fromkeys((holder, name) for _, holder, name in found))
        groups |= dict.fromkeys(modules, (modules, held))
    each_once = {id(group): group for group in groups.values()}
    return [(list(modules), held) for modules, held in each_once.values()]


def _names(types: Types) -> tuple[str, ...]:
    return tuple(getattr(kind, "__name__", kind) for kind in types)


def _with_gradient(value: Any) -> list[Tensor]:
    """The tensors in arguments or results of a module that backward comes through."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
