"""What the kernels ask of a GPU that need not be there: registers, spills and shared memory, read from ptxas.

    python -m cs336_systems.attention.compile_resources          every tile of a Hopper GPU, in minutes
    python -m cs336_systems.attention.compile_resources 120      every tile of a GPU of this capability

Each row says which assembler it is of, and whether that one serializes matmuls. Triton compiles for any
NVIDIA GPU on a machine with none; in processes of its own, because in this one kernels may be interpreted.
"""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
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
# Bytes of shared memory that a block can have. 80 is Ampere, 89 Ada, 90 Hopper, 100, 103 and 120 Blackwell.
SHARED_LIMIT = dict.fromkeys((86, 89, 120), 101_376) | dict.fromkeys((90, 100, 103), 232_448)
SHARED_LIMIT[80] = 166_912
ROW_TENSORS = (
    "lse_ptr",
    "residual_ptr",
    "delta_ptr",
    "dq_accum_ptr",
    "lse2_src",
    "delta_src",
    "dq_dst",
)
Job = tuple[str, str, int, int]  # kernel, dtype, d_head, capability


def tuning_for_capability(dtype: str, d_head: int, capability: int) -> Tuning:
    """The tuning for a GPU of this capability (90 for Hopper) for one of DTYPES."""
    return select_tuning(torch_dtype(dtype), d_head, divmod(capability, 10), 1, dtype == "tf32")


def compile_tiles(work: Sequence[Job]) -> list[dict[str, Any]]:
    """Compile the shipped tiles of each (kernel, dtype, d_head, capability), on all cores.

    Returns:
        A row for each tile, in the order of the work: registers and spilled_bytes
        of a thread, shared_bytes of a block, the most of all forms, what the chip has, and the version of
        the assembler, on which all this depends; `serialized` where matmuls that are meant to run meanwhile
        are waited for. None where the kernel does not run.

    Raises:
        RuntimeError: a tile does not compile; the message ends with the compiler's.
    """
    return _run_python(["-m", __spec__.name, "--json", json.dumps(work)])


def in_own_process(source: str, argument: Any) -> Any:
    """What a program prints as JSON. Its sys.argv[1] is the argument, in JSON.

    Raises:
        RuntimeError: it failed; the message ends with its own.
    """
    # A file, and not `python -c`: Triton reads kernels from their file.
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        print("import json, sys, triton\ntl = triton.language", file=file)
        print(source, file=file, flush=True)
        return _run_python([file.name, json.dumps(argument)])


def _run_python(arguments):
    """What a Python without the interpreter of kernels prints as JSON."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable] + arguments
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"compiling ahead of time failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def main():
    match sys.argv[1:]:
        case ["--json", work]:  # from `compile_tiles`
            # It raises where a compiler ends its process; a Pool would wait. Forked: importing torch takes
            # seconds.
            with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
                rows_of_jobs = list(pool.map(compile_shipped, json.loads(work)))
            print(json.dumps([row for rows in rows_of_jobs for row in rows]))
        case arguments:
            print_tiles(*map(int, arguments))


def print_tiles(capability: int = 90):
    """A line for each tile of heads of 64 and 128."""
    for dtype, d_head in itertools.product(("bfloat16", "tf32", "float32"), (64, 128)):
        kernels = tuning_for_capability(dtype, d_head, capability).tiles
        for row in compile_tiles([(kernel, dtype, d_head, capability) for kernel in kernels]):
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)


def compile_shipped(job: Job) -> list[dict[str, Any]]:
    """The rows of one job, in this process."""
    kernel, *setting = job
    tiles = tuning_for_capability(*setting).all_tiles(kernel)
    return [compile_one(kernel, *setting, tile) for tile in tiles]


def compile_one(
    kernel: str, dtype: str, d_head: int, capability: int, tile: Tile
) -> dict[str, Any]:
    """One row of `compile_tiles`, in this process, where TRITON_INTERPRET must not be 1."""
    forms = [
        ask_ptxas(compiled.asm["ptx"], capability) | {"shared_bytes": compiled.metadata.shared}
        for compiled in compiled_forms(kernel, dtype, d_head, capability, tile)
    ]
    key = {"kernel": kernel, "dtype": dtype, "d_head": d_head, "capability": capability}
    most = {name: max(form[name] for form in forms) for name in forms[0]}
    return key | tile.row() | most | {"shared_limit_bytes": SHARED_LIMIT[capability]}


def compiled_forms(
    kernel: str, dtype: str, d_head: int, capability: int, tile: Tile
) -> Iterator[Any]:
    """Hopper's kernels in all forms: causal or not, with whole tiles of keys or not, and the forward in Gluon
    persistent or not. The others causal, with whole tiles. Those whose loop can be split, both ways."""
    # Imported only to compile: they need Triton, and a notebook without it shows what was recorded.
    import triton

    from cs336_systems.attention.launcher import Launcher
    from cs336_systems.attention.layouts import layout

    triton.runtime.driver.set_active(Chip(capability))
    tuning = tuning_for_capability(dtype, d_head, capability)
    # Without Gluon's kernels, which would run in place of others; but with this one.
    tuning = tuning.with_tiles(**(dict.fromkeys(GLUON_KERNELS) | {kernel: tile}))
    for is_causal, rest, sm_count in _forms(kernel, tuning):
        # On the meta device: none of these numbers takes memory.
        n = tile.block_m * tile.block_n + rest
        x = torch.empty(16, n, d_head, dtype=tuning.dtype, device="meta")
        layouts = [layout(x)] * (4 if kernel.endswith("forward") else 8)
        on_chip = replace(tuning, sm_count=sm_count)
        launch = Launcher(layouts, on_chip, is_causal, kernels=(kernel,)).launches[kernel]
        yield launch.compile(*(_argument(name, kernel, x) for name in launch.tensor_names))


def _forms(kernel, tuning):
    """Whether causal, rows beyond whole tiles, and on how many SMs."""
    depends_on_sms = kernel in tuning.splits or kernel == "hopper_forward"
    sm_counts = (1, MANY_SMS) if depends_on_sms else (1,)
    masks = ((True, False), (0, 1)) if kernel in HOPPER_KERNELS else ((True,), (0,))
    return itertools.product(*masks, sm_counts)


def _argument(name, kernel, x):
    """What a kernel gets for q, k, v or do like x: them, a number a row, or a counter."""
    if name in ROW_TENSORS:
        return x.float().sum(-1)
    if name == "counter_ptr":
        return x.sum(-1).int()
    if kernel in BF16X3_KERNELS and name.endswith("_src"):
        return x.bfloat16()
    return x


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


def ask_ptxas(ptx: str, capability: int) -> dict[str, int | bool | str]:
    """Registers and spilled_bytes of a thread, whether it makes matmuls that are meant to run meanwhile wait,
    and which ptxas says so."""
    from triton.backends.nvidia import compiler

    # Which of its two assemblers depends on Triton: for Hopper that of CUDA 12 up to 3.8, of 13 from 3.9 on.
    ptxas = compiler.get_ptxas(capability)
    # Triton 3.6 has none of these, 3.7 to 3.9 have one; with CUDA 13 it changes what is spilled.
    flags = re.findall(r"--regAllocOptLevel=\d", inspect.getsource(compiler))
    architecture = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        print(ptx, file=file, flush=True)
        command = [ptxas.path, "-v", f"-arch={architecture}", file.name, "-o", os.devnull]
        # With -v it prints to stderr, also where all is well.
        run = subprocess.run(command + flags, capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", run.stderr).group(1)
    spills = re.findall(r"(\d+) bytes spill", run.stderr)
    return {
        "registers": int(registers),
        "spilled_bytes": sum(map(int, spills)),
        "serialized": "Potential Performance Loss" in run.stderr,
        "ptxas": ptxas.version,
    }


if __name__ == "__main__":
    main()
