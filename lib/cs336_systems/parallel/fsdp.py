"""Fully sharded data parallelism: each rank keeps its rows of every weight, and gathers the others' to use.

The order of forward is noted in the first pass. From then on, a parameter group is gathered while the one or
two before it compute; in backward likewise, in the reverse order. A group is freed when it is done, in both.
In backward a hook on the results of a module starts its gather early. Where backward comes another way, it
reads the note that autograd keeps in place of a gathered weight, and that gathers it again (`_kept_weight`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import call
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336_systems.functional import at_least_float32
from cs336_systems.parallel import guards
from cs336_systems.parallel.ddp import DataParallel, average_flat, in_backward, weak_hook
from cs336_systems.parallel.parameter_group import (
    CommunicationStream,
    Home,
    ParameterGroup,
    State,
)

Types = Sequence[type[nn.Module] | str]


class _Hook(partial):
    __reduce_ex__ = guards.refuse_copies  # a module with hooks cannot be copied or pickled


class FSDP(DataParallel):
    """Parameters, gradients and optimizer state sharded over the ranks (ZeRO 3, Rajbhandari et al. 2020).

    Wrapping gives every rank rank 0's values, and then leaves it its rows of every parameter of the modules
    of `shard_types`; the rest (norms, what is frozen) stays whole. `parameters()` are then these shards, for
    an optimizer, made before or after, that treats each element by itself and in place, as SGD and the Adams
    do. Of PyTorch's the others (Adafactor, LBFGS, Muon) are refused at their first step; anybody else's would
    compute another update. Whole weights exist while their group computes: all that is in a module of
    `unit_types`, or else in one module of `shard_types`, and in modules that share a weight with it. Outside
    of that, a module has its shard.

    All ranks have to run the same modules in the same order, or they wait for each other. Each backward pass
    before `finish_gradient_synchronization()` reduces, and the shards add up in their dtype. Under
    `no_sync()` whole gradients stay on this rank and add up in compute_dtype. To give up unfinished passes,
    call `zero_grad()` of the wrapper: an optimizer's knows only the shards. An infinity or a NaN in a
    gradient on one rank becomes a NaN on all, so that a GradScaler skips the step on all. A shard's
    post-accumulate hooks run when the means of its group are there, over NCCL on the reduction's stream.

    What a shard is not: a weight. A function of a whole weight or of all gradients sees this rank's rows.
    torch's `clip_grad_norm_` scales each rank's by another norm: use the wrapper's. `reset_parameters()` of a
    module, or a write of a seeded tensor, fills rows with another deviation, alike on all ranks: initialise,
    then wrap. An optimizer's step in a hook of a parameter that is not sharded comes before its mean.

    Args:
        compute_dtype: to which weights are cast before they are gathered, and floating-point arguments of
            their modules. Gradients are reduced in it. Shards and their gradients keep their dtype.
        shard_types: modules whose parameters are sharded: classes, or their names, which are ours, PyTorch's
            and the course's alike. A class that is derived from one of them is another.
        unit_types: modules that are gathered as one, or derived from them; () gathers each weight on its own.
        prefetch: how many groups are gathered ahead of use; of larger ones, in backward at most 1.

    Raises:
        RuntimeError: there is no process group. In backward, a weight was written to since forward, or the
            pass is to be differentiated (create_graph).
        ValueError: an argument is not allowed, there is nothing to shard or train, several dtypes to shard,
            `register_hook` on a parameter to shard, or the ranks disagree.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        shard_types: Types = ("Linear", "Embedding", "LossHead"),  # training.fused has the last
        *,
        unit_types: Types = (),
        prefetch: int = 2,
    ):
        if compute_dtype is not None and not getattr(compute_dtype, "is_floating_point", False):
            raise ValueError(
                f"compute_dtype is {compute_dtype!r}; allowed: None, or a floating-point dtype"
            )
        self._compute_dtype = compute_dtype
        self._ahead = prefetch
        self._shard_types = [getattr(kind, "__name__", kind) for kind in shard_types]
        self._unit_types = [getattr(kind, "__name__", kind) for kind in unit_types]
        # It calls `_check_module`, which reads these.
        super().__init__(module)
        device = self._trainable[0].device
        streams = [CommunicationStream(device, self._backend) for _ in ("gather", "reduce")]
        names = {other: name or type(module).__name__ for name, other in module.named_modules()}
        self._groups = [
            ParameterGroup(homes, names, compute_dtype, *streams)
            for homes in group_by_user(self._homes)
        ]
        self._indices = {parameter: index for index, parameter in enumerate(self._trainable)}
        self._replicated = [
            index for weight, index in self._indices.items() if weight not in self._sharded
        ]
        # In backward, gradients take the memory of the second block ahead, and it computes for longer.
        self._ahead_in_backward = min(prefetch, 1) if self._unit_types else prefetch
        # As an ordered set.
        self._gathered: dict[ParameterGroup, None] = {}
        # Whole gradients, held while they are on their way, and what waits for their means.
        self._reductions = deque[tuple[list[Tensor], Callable[[], Any]]]()
        # In which forward uses the groups, and the place of each module in it.
        self._order: list[ParameterGroup] = []
        self._positions: dict[nn.Module, int] = {}
        # What to restore, of the modules whose forward is under way.
        self._caches_casts: list[bool] = []
        # Whether `_order` is complete, as it is after the first step.
        self._knows_order = False
        self._add_hooks()
        guards.watch_parts(self._sharded)
        module.register_state_dict_post_hook(guards.mark_state)
        module.register_load_state_dict_pre_hook(guards.check_state)

    __reduce_ex__ = guards.refuse_copies

    def _check_module(self) -> None:
        """Also note what `__init__` goes on with: the weights to shard (an ordered set), and their homes."""
        super()._check_module()
        name = type(self.module).__name__
        homes = list(dict.fromkeys(self._find_homes(self.module)))
        self._sharded = {
            home.parameter: None
            for home in homes
            if type(home.holder).__name__ in self._shard_types and home.parameter.requires_grad
        }
        # Those of a tied weight in other modules, too.
        self._homes = [home for home in homes if home.parameter in self._sharded]
        if not self._sharded:
            types = " or ".join(self._shard_types)
            raise ValueError(
                f"{name} has nothing to shard; allowed: a trainable parameter in a {types}"
            )
        first, *others = {parameter.dtype for parameter in self._sharded}
        if others or not first.is_floating_point:
            raise ValueError(
                f"the weights of {name} are {first} and {others}; allowed: one floating-point dtype"
            )
        if any(shard._backward_hooks for shard in self._sharded):
            raise ValueError(
                "a weight has a hook that FSDP would not call; allowed: post-accumulate hooks"
            )

    def _find_homes(self, module: nn.Module, unit: nn.Module | None = None) -> Iterator[Home]:
        """Of every parameter that has rows."""
        # torch.compile(block) holds the block, and is what is called: the unit is it, not the block inside.
        inner = getattr(module, "_orig_mod", module)
        if unit is None or getattr(unit, "_orig_mod", None) is not module:
            kinds = {kind.__name__ for kind in type(inner).__mro__}
            unit = unit if kinds.isdisjoint(self._unit_types) else module
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 0:
                yield Home(parameter, module if unit is None else unit, module, key)
        last = getattr(module, "gathered_last", None)
        # That child comes last; the sort is stable, and leaves the others as they are.
        for _, child in sorted(module.named_children(), key=lambda child: child[0] == last):
            yield from self._find_homes(child, unit)

    def _add_hooks(self) -> None:
        # torch.compile leaves these calls as they are.
        before = torch.compiler.disable(self._before_forward)
        after = torch.compiler.disable(self._after_forward)
        before_all = torch.compiler.disable(self._before_all)
        for position, group in enumerate(self._groups):
            for user in group.users:
                user.register_forward_pre_hook(_Hook(before, group), prepend=True, with_kwargs=True)
                user.register_forward_hook(_Hook(after, group), always_call=True)
            for number, weight in enumerate(group.weights):
                hook = weak_hook(self._gradient_is_ready, position, number)
                weight.whole.register_post_accumulate_grad_hook(hook)
        self.module.register_forward_pre_hook(_Hook(before_all), prepend=True)

    def _before_all(self, module: nn.Module, args: tuple) -> None:
        # Else backward computes it once more.
        if not in_backward():
            # What an earlier pass left gathered is stale after the optimizer's step.
            self._free_all()

    # These run for every group in every pass, and a training step in 16 bits may wait for Python.
    def _before_forward(
        self, group: ParameterGroup, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple:
        self._enter(group)
        self._gather_ahead(group, module)
        group.unshard()
        return self._cast((args, kwargs))

    def _enter(self, group: ParameterGroup) -> None:
        """From here autograd keeps notes of whole weights in place of them, and autocast no copies."""
        group.calls += 1
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        casts = torch.is_autocast_enabled(self._trainable[0].device.type)
        pack = partial(self._pack, outer, casts)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, call)
        self._caches_casts.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        # A shard may be frozen for a while, as in a GAN.
        for parameter, whole in group.weights:
            whole.requires_grad_(parameter.requires_grad)

    def _leave(self, group: ParameterGroup) -> None:
        group.calls -= 1
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_autocast_cache_enabled(self._caches_casts.pop())

    def _gather_ahead(self, group: ParameterGroup, module: nn.Module) -> None:
        """Gather the group, and begin with those that forward uses next.

        The first forward of a module also notes its place in the order: `setdefault` gives it the next one.
        """
        following: list[ParameterGroup] = []
        # Else backward computes it once more, and what comes next is no matter of forward's order.
        if not in_backward():
            group.position = self._positions.setdefault(module, len(self._order))
            if group.position == len(self._order):
                self._order.append(group)
            after = group.position + 1
            following = self._order[after : after + self._ahead]
        self._collect(group, following)

    def _cast(self, arguments: tuple) -> tuple:
        dtype = self._compute_dtype
        if dtype is None:
            return arguments
        return tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, arguments
        )

    def _after_forward(
        self, group: ParameterGroup, module: nn.Module, args: tuple, output: Any
    ) -> None:
        """Have backward gather the group when it comes to the results; free it here, or only offer shards.

        In backward, where a checkpoint computes a forward once more, its modules keep the whole weights.
        """
        self._leave(group)
        # One user may be inside of another.
        if group.calls:
            return
        results = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if torch.is_grad_enabled():
            # A module that only backward calls has no place, and nothing is gathered ahead of it.
            position = self._positions.get(module, 0)
            for tensor in results:
                tensor.register_hook(lambda _: self._before_backward(group, position))
        if group.state is State.IN_BACKWARD:
            return
        # It may be gone already: after an error, or a backward pass inside of its forward.
        if group in self._gathered and not self._stays(group, bool(results)):
            self._free(group)
        else:
            group.reshard()

    def _stays(self, group: ParameterGroup, has_results: bool) -> bool:
        """Whether backward is about to want the whole weights that forward has used."""
        # It begins with the last group, but in the first pass nobody knows which one that is.
        is_last = self._knows_order and group is self._order[-1]
        return is_last and has_results and not in_backward()

    def _pack(
        self, outer: tuple[Callable, Callable] | None, casts: bool, tensor: Tensor
    ) -> Callable:
        """What autograd keeps in place of a tensor that forward saves: backward calls it to have the tensor.

        Of a gathered weight, or what autocast made of one (`casts`), a note that gathers it again. Of others
        what the hooks around ours make, (pack, unpack) in `outer`, as those of checkpointing; without such
        hooks the tensor, and a check that it is unchanged.
        """
        leaf, remake = _leaf_of_cast(tensor) if casts else (tensor, None)
        try:
            pointer = leaf.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a sparse or nested tensor has none
            pointer = 0
        for group in self._gathered:
            if group.pointer == pointer:
                note = (leaf.detach(), group, group.versions, group.position, remake)
                return partial(self._kept_weight, *note)
        if outer is not None:
            return partial(outer[1], outer[0](tensor))
        return partial(_kept_tensor, tensor.detach(), tensor._version)

    def _kept_weight(
        self,
        whole: Tensor,
        group: ParameterGroup,
        versions: int,
        position: int,
        remake: Callable | None,
    ) -> Tensor:
        """What a note of `_pack` gives: the weight, for backward gathered again and cast again (`remake`).

        whole: a view of the group's memory, which is there only while it is gathered. versions, position: the
        group's when forward saved it. RuntimeError: it was written to since, or wants a second derivative.
        """
        _check_unchanged(group.name, versions, group.versions_now())
        # Somebody looks at the graph, outside of any backward.
        if torch._C._current_graph_task_id() == -1:
            return whole
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward pass through {group.name} of an FSDP is to be differentiated; allowed: "
                "create_graph=False, as its weights will be gone (the other wrappers can)"
            )
        self._before_backward(group, position)
        return remake(whole) if remake else whole

    def _before_backward(self, group: ParameterGroup, position: int) -> None:
        if group.state is State.IN_BACKWARD:
            return
        self._announce_end()
        first = max(position - self._ahead_in_backward, 0)
        self._collect(group, self._order[first:position][::-1])
        group.state = State.IN_BACKWARD
        # A part of its forward may be computed once more.
        group.unshard()

    def _collect(self, group: ParameterGroup, following: list[ParameterGroup]) -> None:
        """Start what gathers are missing, of stale weights anew; wait for that of `group` alone."""
        for other in [group] + following:
            if other in self._gathered and other.versions != other.versions_now():
                # It was gathered ahead of an optimizer's step.
                self._free(other)
            if other not in self._gathered:
                other.start_gather()
                self._gathered[other] = None
        group.wait_for_gather()

    def _gradient_is_ready(self, position: int, number: int) -> None:
        """Of a whole weight. With the last of its group the group is freed, and its gradients leave.

        position: of the group in `_groups`, here alone; elsewhere it is the place in forward's order.
        number: of the weight in the group.
        """
        group = self._groups[position]
        self._announce_end()
        group.ready.add(number)
        if len(group.ready) < len(group.weights):
            return
        group.ready.clear()
        if group in self._gathered and not group.calls:
            self._free(group)
        if self._synchronizes:
            self._start_reduction(group)

    def _start_reduction(self, group: ParameterGroup) -> None:
        """Send the whole gradients of a group; `_wait_for_reductions` brings the means to the shards."""
        # Of a weight that this pass lacks an earlier one may still bring `parameter.grad`, read below.
        if any(weight.whole.grad is None for weight in group.weights):
            self._wait_for_reductions()
        for parameter, whole in group.weights:
            if whole.grad is not None:
                self._unused.discard(self._indices[parameter])
            elif parameter.grad is None:
                self._unused.add(self._indices[parameter])
        # Or whole gradients would pile up.
        self._wait_for_reductions(leave=max(self._ahead_in_backward, 1) - 1)
        self._reductions.append(group.start_reduction())

    def _wait_for_reductions(self, leave: int = 0) -> None:
        while len(self._reductions) > leave:
            _, wait = self._reductions.popleft()
            wait()

    def _backward_ends(self) -> None:
        super()._backward_ends()
        if self._is_over:
            self._free_all()

    def _free(self, group: ParameterGroup) -> None:
        group.free()
        del self._gathered[group]

    def _free_all(self) -> None:
        for group in list(self._gathered):
            self._free(group)

    def _average_gradients(self) -> None:
        for group in self._groups:
            # Of passes under no_sync(), or of some of its weights.
            if any(weight.whole.grad is not None for weight in group.weights):
                self._start_reduction(group)
        average_flat([self._gradient(index) for index in self._replicated], self._backend)
        self._wait_for_reductions()
        self._free_all()
        self._is_over = False
        self._knows_order = True

    def _settle(self) -> None:
        """Also: a gradient that is infinite or NaN on one rank puts a NaN into those of every rank."""
        gradients = [parameter.grad for parameter in self._trainable]
        shards = [each for each in gradients if each is not None and each.numel()]
        used = self._used_here()
        is_bad = used.new_zeros(1)
        if shards:
            # Of each shard the largest magnitude, one number, which is not finite if any of them is not.
            largest = torch.stack(torch._foreach_norm(shards, torch.inf))
            is_bad = largest.isfinite().all().logical_not().view(1)
        # One message for both: a start costs more than its bytes.
        flags = torch.cat((used, is_bad))
        self._all_reduce_flags(flags)
        if shards:
            # A NaN or 0 to each shard's first number: so the CPU need not read the flag and wait for a GPU.
            # as_strided is a view of any layout, where flatten() may copy.
            nan = torch.where(flags[-1].bool(), torch.nan, 0.0)
            torch._foreach_add_([shard.as_strided((), ()) for shard in shards], nan)

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> "FSDP":
        """What `to`, `half`, `cuda` and the like call; RuntimeError if they would change dtype or device.

        That is tried with an empty piece of a shard.
        """
        shard = next(iter(self._sharded)).detach()[:0]
        changed = change(shard)
        if (changed.dtype, changed.device) != (shard.dtype, shard.device):
            raise RuntimeError(
                f"a wrapped module is to become {changed.dtype} on {changed.device}; allowed: "
                f"{shard.dtype} on {shard.device}, or change the module, then wrap it"
            )
        return super()._apply(change, recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module, and forget the gradients that are not yet in the shards."""
        self._wait_for_reductions()
        self._free_all()
        for group in self._groups:
            for weight in group.weights:
                weight.whole.grad = None
        self._is_over = False
        super().zero_grad(set_to_none)

    def apply(self, change: Callable[[nn.Module], None]) -> NoReturn:
        """What initialises modules is refused: RuntimeError."""
        raise RuntimeError(
            "apply() of an FSDP sees shards, and would fill every rank's rows alike; allowed: initialise, "
            "then wrap"
        )

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the module that was wrapped; all ranks have to ask for it.

        A tied weight has all its names. The tensors are copies in the dtype of the shards; parameters that
        are not sharded are returned as they are.
        """
        wholes = dict(pair for group in self._groups for pair in group.gather_full())
        # What torch.compile wraps has the name of its wrapper before its own.
        return {
            name.replace("_orig_mod.", ""): wholes.get(parameter, parameter.detach())
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most max_norm; returns what it was.

        Call it after `finish_gradient_synchronization()`, on all ranks.
        """
        # Backward has ended, and nothing was averaged since.
        if self._is_over:
            raise RuntimeError(
                "gradients are to be clipped that are not yet averaged; allowed: after "
                "finish_gradient_synchronization()"
            )
        of_shards = self._squared_norm(self._sharded)
        dist.all_reduce(of_shards)
        replicated = [self._trainable[index] for index in self._replicated]
        total = (of_shards + self._squared_norm(replicated)).sqrt()
        clip_grads_with_norm_(self._trainable, max_norm, total)
        return total

    def _squared_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Of nothing it is on the CPU.
        norm = get_total_norm(gradients).to(self._trainable[0].device)
        return at_least_float32(norm) ** 2


def _kept_tensor(tensor: Tensor, version: int) -> Tensor:
    _check_unchanged(f"a tensor {tuple(tensor.shape)}", version, tensor._version)
    return tensor


def _check_unchanged(what: str, then: int, now: int) -> None:
    if now != then:
        raise RuntimeError(
            f"{what}, needed for gradient computation, has been modified by an inplace operation; "
            "allowed: an optimizer's step, or loading, after backward"
        )


def _leaf_of_cast(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """If autocast made a tensor, or what it is a view of, from a leaf: the leaf, and how to make it again."""
    cast = tensor if tensor._base is None else tensor._base
    # A cast is a node of the graph, ToCopyBackward. The one before it, if of a leaf, has it as `variable`.
    sources = cast.grad_fn.next_functions if "ToCopy" in str(cast.grad_fn) else [(None, 0)]
    leaf = getattr(sources[0][0], "variable", None)
    if leaf is None:
        return tensor, None
    dtype = tensor.dtype
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
    return leaf, lambda leaf: leaf.to(dtype).as_strided(*layout)


def group_by_user(homes: Iterable[Home]) -> list[Iterable[Home]]:
    """The homes of parameters that are used together: by one module, or by all that share one of them."""
    # Ordered sets of homes, each under all of its parameters and users.
    groups: dict[nn.Module | nn.Parameter, dict[Home, None]] = {}
    for home in homes:
        # What was together so far, by the parameter or by the user, and this home: from here on one set.
        together = groups.get(home.parameter, {}) | groups.get(home.user, {}) | {home: None}
        for other in together:
            groups[other.parameter] = together
            groups[other.user] = together
    return list({id(group): group for group in groups.values()}.values())
