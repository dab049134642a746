"""What autograd keeps for backward, tensor by tensor: measured with saved-tensor hooks, on any device."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PACKAGE = Path(__file__).parents[1]


def saved_for_backward(module: nn.Module, *inputs: Any) -> pd.DataFrame:
    """The storages that one forward of `module` keeps for backward; each once, whoever saves it again.

    Parameters and buffers are not counted: they are there anyway. Inputs are, with `is_input`.

    Returns:
        One row a storage, the largest first: module (path in `module`), operation that saved it first, code
        (its line in this library), shape, dtype, size_bytes, is_input.
    """
    with SavedTensors(module, inputs) as saved:
        output = module(*inputs)
    del output  # kept until here: what a freed graph saved would be freed too
    return saved.table()


def contributors(saved: pd.DataFrame) -> pd.DataFrame:
    """Saved bytes by line of code and operation, the largest first, with their share of the whole."""
    keys = ["module", "operation", "code"]
    grouped = saved.groupby(keys, sort=False).agg(
        tensors=("size_bytes", "size"), size_bytes=("size_bytes", "sum")
    )
    grouped["share"] = grouped.size_bytes / grouped.size_bytes.sum()
    return grouped.sort_values("size_bytes", ascending=False).reset_index()


def gradient_bytes(module: nn.Module) -> pd.DataFrame:
    """The gradients that backward left on a module's parameters: name, shape, dtype, size_bytes."""
    return pd.DataFrame(
        {
            "name": name,
            "shape": tuple(parameter.grad.shape),
            "dtype": str(parameter.grad.dtype).removeprefix("torch."),
            "size_bytes": parameter.grad.nbytes,
        }
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    )


class SavedTensors(TorchFunctionMode):
    """While active, notes every storage that autograd saves, and which operation of which module saved it."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...] = ()):
        super().__init__()
        self._names = {id(child): name for name, child in module.named_modules()}
        owned = [*module.parameters(), *module.buffers()]
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor)}
        self._operations: list[str] = []
        self._rows: dict[int, dict[str, Any]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedTensors":
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
        if address not in self._owned and address not in self._rows:
            module, function, code = self._where()
            self._rows[address] = {
                "module": module,
                "operation": self._operations[-1] if self._operations else function,
                "code": code,
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "size_bytes": storage.nbytes(),
                "is_input": address in self._inputs,
            }
        # Detached: an operation that held its own output would never be freed.
        return tensor.detach()

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

    def table(self) -> pd.DataFrame:
        """What was saved, as `saved_for_backward` describes it."""
        columns = ["module", "operation", "code", "shape", "dtype", "size_bytes", "is_input"]
        frame = pd.DataFrame(self._rows.values(), columns=columns)
        return frame.sort_values("size_bytes", ascending=False, kind="stable", ignore_index=True)
