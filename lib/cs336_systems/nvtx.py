"""Named ranges of time for every profiler: NVTX for Nsight Systems, record_function for torch.profiler.

    with recording(model):        # ranges are off unless somebody records
        with annotate("forward"):
            model(token_ids)      # inside, every submodule opens its own range: layers.3, attn, q_proj ...

A kernel's *range path* is the names of the ranges open when it was launched:
forward/layers.3/attn/attention/softmax.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.profiler import record_function

_OFF = nullcontext()
# One flag for the process and not for a thread: backward runs on threads of autograd's own.
_recording = False


def annotate(name: str) -> AbstractContextManager:
    """A range called `name` around the code inside.

    While nobody records it does nothing, and torch.compile never sees it.
    """
    if torch.compiler.is_compiling() or not _recording:
        return _OFF
    return _range(name)


@contextmanager
def _range(name: str) -> Iterator[None]:
    # CPU builds of torch have no NVTX.
    with torch.cuda.nvtx.range(name) if torch.cuda.is_available() else _OFF, record_function(name):
        yield


@contextmanager
def recording(*models: nn.Module) -> Iterator[None]:
    """Turn ranges on; inside, every submodule of `models` also opens a range around its forward.

    The models carry hooks only inside, so a model that nobody records is exactly the model that was written.
    """
    global _recording
    before = _recording
    _recording = True
    with ExitStack() as hooks:
        try:
            for model in models:
                _hook_modules(model, hooks)
            yield
        finally:
            _recording = before


def _hook_modules(model: nn.Module, hooks: ExitStack) -> None:
    """A range is named as its module within the nearest one around it that is called: layers.3, attn, q_proj.

    A list of modules is never called, so it gives its name to its members.
    """
    called = list[str]()
    for name, module in model.named_modules():  # a module comes before those inside it
        if not name or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        # layers.3.attn lies in layers.3, the longest name that it begins with: its label is attn.
        parent = max((each for each in called if name.startswith(f"{each}.")), key=len, default="")
        called.append(name)
        label = name.removeprefix(f"{parent}.")
        opened = list[AbstractContextManager]()

        # Defaults: when these are called, the names are the last module's.
        def enter(module, inputs, opened=opened, label=label) -> None:
            if not torch.compiler.is_compiling():
                opened.append(annotate(label))
                opened[-1].__enter__()

        def leave(module, inputs, output, opened=opened) -> None:
            if not torch.compiler.is_compiling():
                opened.pop().__exit__(None, None, None)

        # training.fused asks: a module with these hooks alone still does what its class says.
        enter.only_observes = leave.only_observes = True
        hooks.callback(module.register_forward_pre_hook(enter).remove)
        # always_call: a forward that raises (out of memory) must still close its range.
        hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
