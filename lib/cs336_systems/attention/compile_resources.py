"""What the kernels ask of a GPU that need not be there: registers, spills and shared memory, read from ptxas.

Triton compiles for any NVIDIA GPU on a machine with none. It does so in processes of its own, because in this
one the kernels may be set up for the interpreter.
"""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from cs336_systems.attention.tiles import (
    BF16X3_KERNELS,
    GLUON_KERNELS,
    HOPPER_KERNELS,
    Tile,
    Tuning,
    select_tuning,
)
from cs336_systems.dtypes import torch_dtype

MANY_SMS = 2**20  # enough for every loop to be split, and for every work tile to have a program
# Bytes of shared memory that a block can have. 80 is Ampere, 89 Ada, 90 Hopper, 100 Blackwell.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
_HEAD = "import json, sys, triton\ntl = triton.language"
_SHIPPED = f"""
from concurrent.futures import ProcessPoolExecutor  # raises where a compiler ends its process; a Pool waits
from multiprocessing import get_context
from {__name__} import compile_one, tuning_for_capability
def shipped(kernel, *place):
    return [compile_one(kernel, *place, tile) for tile in tuning_for_capability(*place).all_tiles(kernel)]
with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
    print(json.dumps(list(pool.map(shipped, *zip(*json.loads(sys.argv[1]))))))
"""


def tuning_for_capability(dtype: str, d_head: int, capability: int) -> Tuning:
    """The tuning for a GPU of this capability (90 for Hopper) for one of DTYPES."""
    return select_tuning(torch_dtype(dtype), d_head, divmod(capability, 10), 1, dtype == "tf32")


def compile_tiles(work: list[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """Compile the shipped tiles of each (kernel, dtype, d_head, capability), on all cores.

    Returns:
        A row of table kernel_resources for each tile, in the order of the work: registers and spilled_bytes
        of a thread, shared_bytes of a block, the most of all forms, and what the chip has. None where the
        kernel does not run.

    Raises:
        RuntimeError: a tile does not compile, or matmuls that are meant to run meanwhile are waited for; the
            message ends with the compiler's.
    """
    return [row for rows in in_own_process(_SHIPPED, work) for row in rows]


def in_own_process(source: str, given: Any, kernels: Iterable[Any] = ()) -> Any:
    """What a program with a notebook's kernels prints as JSON; `given` is in sys.argv[1]. RuntimeError."""
    with tempfile.NamedTemporaryFile(
        "w", suffix=".py"
    ) as file:  # Triton reads kernels from their file
        parts = [_HEAD, *(inspect.getsource(kernel.fn) for kernel in kernels), source]
        print("\n".join(parts), file=file, flush=True)
        command, environment = (
            [sys.executable, file.name, json.dumps(given)],
            {"TRITON_INTERPRET": "0"},
        )
        run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"compiling ahead of time failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def compile_one(
    kernel: str, dtype: str, d_head: int, capability: int, tile: Tile
) -> dict[str, Any]:
    """One row of `compile_tiles`, in this process, where TRITON_INTERPRET must not be 1."""
    found = [
        ask_ptxas(compiled.asm["ptx"], capability) | {"shared_bytes": compiled.metadata.shared}
        for compiled in compiled_forms(kernel, dtype, d_head, capability, tile)
    ]
    key = {"kernel": kernel, "dtype": dtype, "d_head": d_head, "capability": capability}
    most = {what: max(each[what] for each in found) for what in found[0]}
    return key | tile.row() | most | {"shared_limit_bytes": SHARED_LIMIT[capability]}


def compiled_forms(
    kernel: str, dtype: str, d_head: int, capability: int, tile: Tile
) -> Iterator[Any]:
    """Hopper's kernels in all forms: causal or not, with whole tiles of keys or not, and the forward in Gluon
    persistent or not. The others causal, with whole tiles. Those whose loop can be split, both ways."""
    import triton

    from cs336_systems.attention.launcher import Launcher, layout

    triton.runtime.driver.set_active(Chip(capability))
    tuning = tuning_for_capability(dtype, d_head, capability)
    tuning = tuning.with_tiles(**(dict.fromkeys(GLUON_KERNELS) | {kernel: tile}))
    masks = itertools.product((True, False), (0, 1)) if kernel in HOPPER_KERNELS else [(True, 0)]
    sm_counts = (1, MANY_SMS) if kernel in {*tuning.splits, "hopper_forward"} else (1,)
    for (is_causal, odd), sm_count in itertools.product(masks, sm_counts):
        n = tile.block_m * tile.block_n + odd  # whole tiles, or one row more
        x = torch.empty(16, n, d_head, dtype=tuning.dtype, device="meta")
        rows = torch.empty(16, n, device="meta")
        layouts, changed = (
            [layout(x)] * (4 if kernel.endswith("forward") else 8),
            {"sm_count": sm_count},
        )
        launch = Launcher(
            layouts, replace(tuning, **changed), is_causal, kernels=(kernel,)
        ).launches[kernel]
        of_rows = (
            "lse_ptr",
            "residual_ptr",
            "delta_ptr",
            "dq_accum_ptr",
            "lse2_src",
            "delta_src",
            "dq_dst",
        )
        made = dict.fromkeys(of_rows, rows) | {"counter_ptr": rows.int()}
        made["_src"] = x.bfloat16() if kernel in BF16X3_KERNELS else x
        yield launch.compile(
            *(made.get(name, made.get(name[-4:], x)) for name in launch.tensor_names)
        )


@dataclass
class Chip:
    """What Triton asks a driver before it compiles, answered for a GPU that need not be there."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def ask_ptxas(ptx: str, capability: int) -> dict[str, int]:
    """Registers and spilled_bytes of a thread."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    architecture = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        print(ptx, file=file, flush=True)
        command = [tool.path, "-v", f"-arch={architecture}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    if waiting := re.search(r".*Potential Performance Loss.*", said):
        raise RuntimeError(waiting.group())
    return {
        "registers": int(re.search(r"Used (\d+) registers", said).group(1)),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
    }
