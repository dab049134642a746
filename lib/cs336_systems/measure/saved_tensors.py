"""What autograd keeps for backward: measured with saved-tensor hooks, on any device."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PACKAGE = Path(__file__).parents[1]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def saved_bytes(forward: Callable[[], Tensor], inputs: Iterable[Tensor]) -> tuple[int, int]:
    """Run a forward and count what stays until its backward.

    Args:
        forward: returns its output; it must record gradients.
        inputs: the tensors it reads.

    Returns:
        Bytes of the distinct storages that autograd saved; and bytes in use: inputs, output and saved tensors
        on a CPU, on a GPU what the allocator handed out during the forward, and the inputs.
    """
    inputs, saved = list(inputs), []

    def pack(tensor: Tensor) -> Tensor:
        # Detached: an operation that held its own output would never be freed.
        saved.append(tensor.detach())
        return saved[-1]

    device = inputs[0].device
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    if not on_cuda:
        return storage_bytes(saved), storage_bytes([*saved, output, *inputs])
    return storage_bytes(saved), torch.cuda.memory_allocated(device) - before + storage_bytes(inputs)


def saved_for_backward(module: nn.Module, *inputs: Any) -> pd.DataFrame:
    """The storages that one forward of `module` keeps for backward; each once, whoever saves it again.

    Parameters and buffers are not counted: they are there anyway. Inputs are, with `is_input`.

    Returns:
        One row a storage, the largest first: module (path in `module`), operation that saved it first, code
        (its line in this library), size_bytes, dtype, is_input.
    """
    with _SavedTensors(module, inputs) as saved:
        output = module(*inputs)
    del output  # kept until here: what a freed graph saved would be freed too
    columns = ["module", "operation", "code", "size_bytes", "dtype", "is_input"]
    frame = pd.DataFrame(saved.storages.values(), columns=columns)
    return frame.sort_values("size_bytes", ascending=False, kind="stable", ignore_index=True)


def contributors(saved: pd.DataFrame) -> pd.DataFrame:
    """Saved bytes by module, operation and line of code, the largest first: count, size_bytes."""
    grouped = saved.groupby(["module", "operation", "code"], sort=False)["size_bytes"]
    sums = grouped.agg(count="size", size_bytes="sum").reset_index()
    return sums.sort_values("size_bytes", ascending=False, ignore_index=True)


class _SavedTensors(TorchFunctionMode):
    """While active, notes every storage that autograd saves, and which operation of which module saved it."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]):
        super().__init__()
        self.storages: dict[int, tuple] = {}  # by address; `saved_for_backward` names the columns
        self._names = {id(child): name for name, child in module.named_modules()}
        self._owned, self._inputs = (
            {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, Tensor)}
            for tensors in ([*module.parameters(), *module.buffers()], inputs)
        )
        self._operations: list[str] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "_SavedTensors":
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None) -> Any:
        self._operations.append(getattr(function, "__name__", str(function)).strip("_"))
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._operations.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._owned and address not in self.storages:
            module, function, code = self._where()
            operation = self._operations[-1] if self._operations else function
            dtype = str(tensor.dtype).removeprefix("torch.")
            is_input = address in self._inputs
            self.storages[address] = (module, operation, code, storage.nbytes(), dtype, is_input)
        return tensor.detach()  # as in `saved_bytes`

    def _where(self) -> tuple[str, str, str]:
        """The innermost module, and the innermost function and line of this library, that are running."""
        frame, module, function, code = sys._getframe(2), None, "", ""
        while frame is not None and module is None:
            path = Path(frame.f_code.co_filename)
            if not code and path.is_relative_to(PACKAGE) and path != Path(__file__):
                function = frame.f_code.co_name
                code = f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}"
            module = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return module or "", function, code
