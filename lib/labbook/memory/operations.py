"""What operations keep for backward, read and write: found with PyTorch's hooks and modes."""

import gc
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from traceback import walk_stack
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from labbook.project import project

_NOTHING_MOVES = ("empty", "new_empty")  # memory is reserved and left as it is
_GATHERS = ("embedding", "index", "index_select", "gather")  # read only as much as they write
# Do not read `self`: they replace it, or take only its shape.
_IGNORES_SELF = re.compile(
    r"(_foreach_)?(copy|fill|zero|normal|uniform|random|bernoulli)_|new_.*|.*_like"
)


def _register_flops(name, factor, query):
    """A formula that PyTorch lacks: factor * elements of argument `query` * rows of the next, or 1."""
    packet = getattr(torch.ops.aten, name)

    def formula(*shapes, **_):
        operand = shapes[query + 1]
        keys = operand[-2] if len(operand) > 1 else 1
        return factor * shapes[query].numel() * keys

    if packet not in flop_registry:
        register_flop_formula(packet)(formula)


_register_flops("mv", 2, 0)
_register_flops("dot", 2, 0)
_register_flops("vdot", 2, 0)
_register_flops("addmv", 2, 1)
_register_flops("_scaled_dot_product_flash_attention_for_cpu", 4, 0)
_register_flops("_scaled_dot_product_flash_attention_for_cpu_backward", 10, 1)


@cache
def _ours():
    """Files of the packages that have measured rooms."""
    packages = {room.partition(".")[0] for room in project().measured}
    return re.compile(rf".*/(?:{'|'.join(sorted(packages))})/(.+)")


def saved_bytes(forward: Callable, inputs: Iterable[Tensor]) -> tuple[int, int]:
    """Run a forward that records gradients and count what stays until its backward.

    On a CPU with what Python still holds then: attributes of a Function's ctx, results that a selective
    checkpoint keeps. On a GPU these are in bytes in use alone.

    Returns bytes of the distinct storages that are saved; and bytes in use: `inputs`, output and saved
    tensors on a CPU, on a GPU what the allocator handed out during the forward, and the inputs.
    """
    inputs = list(inputs)
    saved = []

    def pack(tensor):
        # Detached: an operation that held its own output would never be freed.
        saved.append(tensor.detach())
        return saved[-1]

    device = inputs[0].device
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    gc.freeze()  # what there is now is not found below
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward()
        if on_cuda:
            in_use = torch.cuda.memory_allocated(device) - before + storage_bytes(inputs)
        else:
            held = tensors_of_python()
            saved += [tensor for tensor in held if tensor is not output]
            in_use = storage_bytes(held + inputs)
    finally:
        gc.unfreeze()  # all of it: also what a page or the caller froze before
    return storage_bytes(saved), in_use


def tensors_of_python() -> list[Tensor]:
    """All tensors that Python's collector knows, not frozen ones, and that have memory of their own."""
    gc.collect()
    # Neither a DTensor nor what torch.compile traces with.
    kinds = (Tensor, nn.Parameter)
    return [value for value in gc.get_objects() if type(value) in kinds and not value.is_meta]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = map(Tensor.untyped_storage, tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def saved_for_backward(module: nn.Module, *inputs) -> pd.DataFrame:
    """The storages that one forward of `module` keeps for backward; each once, whoever saves it again.

    Parameters and buffers are not counted: they are there anyway. Inputs are. Attributes of a ctx and what a
    selective checkpoint keeps, autograd does not see.
    Returns one row a storage, the largest first: module (path in `module`), operation that saved it first,
    code (see `own_line`), size_bytes.
    """
    owned = {
        tensor.untyped_storage()._cdata for tensor in chain(module.parameters(), module.buffers())
    }
    paths = {id(child): path for path, child in module.named_modules()}
    rows = {}  # by storage
    running = []  # functions of PyTorch, the innermost last

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            running.append(getattr(function, "__name__", str(function)).strip("_"))
            try:
                return function(*args, **(kwargs or {}))
            finally:
                running.pop()

    def pack(tensor):
        storage = tensor.untyped_storage()
        address = storage._cdata  # unlike data_ptr() also of meta tensors
        if address not in owned and address not in rows:
            path, function, code = _running_module(paths)
            # In a Function of ours none of PyTorch's is running.
            operation = running[-1] if running else function
            rows[address] = (path, operation, code, storage.nbytes())
        return tensor.detach()  # as in `saved_bytes`

    with saved_tensors_hooks(pack, lambda tensor: tensor), Functions():
        output = module(*inputs)
    del output  # kept until here: what a freed graph saved would be freed too
    frame = pd.DataFrame(rows.values(), columns=["module", "operation", "code", "size_bytes"])
    return frame.sort_values("size_bytes", ascending=False, kind="stable", ignore_index=True)


def _running_module(paths):
    """The path of the innermost module that is running; function and line of ours that run in it.

    By the stack, without hooks, which would send fused blocks another way. paths: of modules, by their id.
    """
    stack = []
    for frame, line in walk_stack(sys._getframe()):
        stack.append((frame.f_code.co_filename, line, frame.f_code.co_name))
        owner = id(frame.f_locals.get("self"))
        if owner in paths:
            break
    function, code = own_line(stack)
    # Where no frame was a module's, the last owner has no path.
    return paths.get(owner, ""), function, code


def own_line(stack: Iterable[tuple[str, int, str]]) -> tuple[str, str]:
    """The innermost function of the project in a stack, and its line; both "" where there is none.

    "plain_attention", "attention/plain.py:37 plain_attention: return w @ v". There is none in backward:
    autograd's threads run no Python of ours.

    stack: file, line and function of each frame, the innermost first.
    """
    for file, line, function in stack:
        if ours := _ours().match(file):
            source = linecache.getline(file, line).strip()
            return function, f"{ours[1]}:{line} {function}: {source}".removesuffix(": ")
    return "", ""


class Operation(NamedTuple):
    """One operation of eager PyTorch, as a rule one kernel: it reads its inputs and writes its output."""

    name: str
    # Of matmuls and attention; 0 for all that has no formula in torch.utils.flop_counter.flop_registry.
    flops: int
    bytes_moved: int


def operations_of(function: Callable) -> list[Operation]:
    """The operations that a call of the function runs, its backward included where it calls that.

    Views are left out: they move nothing. Temporaries inside one operation are not seen, nor are the fused
    kernels of compiled code: of that only the library's operations are, its matmuls. What looks at modes
    before it computes, as fused blocks do, may take another way in here: count a checkpointed forward and
    its backward in one call, or the checkpoint, which computes again, does not find what it had.
    """
    operations = []

    class Recorder(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True  # else compiled code would run as plain functions, and stay so for this process

        @classmethod
        def _should_skip_dynamo(cls):
            return "torch._dynamo" in sys.modules  # to skip it would import it, which takes seconds

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result = operation(*args, **kwargs)
            packet = operation.overloadpacket
            name = packet.__name__
            bytes_moved = _bytes_moved(name, operation._schema, args, kwargs, result)
            if bytes_moved is not None:
                # That of addmm is addmm_'s, too.
                formula = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), packet))
                flops = formula(*args, **kwargs, out_val=result) if formula else 0
                operations.append(Operation(name, flops, bytes_moved))
            return result

    with Recorder():
        function()
    return operations


def _bytes_moved(name, schema, args, kwargs, result):
    """What an operation has read and written; None where it moves nothing."""
    declared = schema.arguments
    names = [argument.name for argument in declared]
    values = dict(zip(names, args, strict=False)) | kwargs  # defaults are not given
    unread = {argument.name for argument in declared if argument.is_out}
    if _IGNORES_SELF.fullmatch(name):
        unread.add("self")
    changed = {argument.name for argument in declared if argument.is_write}
    # Fused optimizers write gradients only to scale them.
    if values.get("grad_scale") is None:
        changed.discard("grads")
    written = _sizes(result) | _sizes([values.get(name) for name in changed])
    # All its results lie in storages of its inputs, and none is written to.
    is_view = written.keys() <= _sizes(values).keys() and not schema.is_mutable
    if is_view or name.startswith(_NOTHING_MOVES):
        return None
    read_bytes = _sizes([value for key, value in values.items() if key not in unread]).total()
    if name in _GATHERS:
        read_bytes = min(read_bytes, written.total())
    return read_bytes + written.total()


def sum_of_rooflines_ms(
    operations: Iterable[Operation], matmul_tflops: float, copy_gbps: float
) -> float:
    """Least time when each operation is a kernel of its own, waiting for the one before: a sum of rooflines.

    operations: what `operations_of` returned.
    matmul_tflops, copy_gbps: rates, as on a machine's card.
    """
    return sum(
        max(operation.flops / matmul_tflops / 1e9, operation.bytes_moved / copy_gbps / 1e6)
        for operation in operations
    )


def _sizes(tree):
    """Bytes by storage, at most all of it: what is expanded, or given twice as a whole, passes once."""
    sizes = Counter()
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            sizes[storage._cdata] = min(sizes[storage._cdata] + leaf.nbytes, storage.nbytes())
    return sizes
