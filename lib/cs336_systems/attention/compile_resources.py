"""What the kernels ask of a GPU that need not be there: registers, spills and shared memory, read from ptxas.

Triton compiles for any NVIDIA GPU on a machine with none. It does so in processes of its own, because in this
one the kernels may be set up for the interpreter.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import pandas as pd

from cs336_systems.attention.config import (
    HOPPERS_OWN,
    KERNELS,
    Tile,
    exact_precision,
    tile_by_hand,
    tiles_for,
    uses_descriptors,
)

ARITHMETICS = ("half", "tf32", "exact")
# Bytes of shared memory that a block can have.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def resources(
    capabilities: Iterable[int] = (80, 90, 100),
    kernels: Iterable[str] = KERNELS,
    arithmetics: Iterable[str] = ARITHMETICS,
    head_sizes: Iterable[int] = (64, 128, 256),
) -> pd.DataFrame:
    """Compile the tiles that the tuning table gives, causal, in as many processes as there are cores.

    Args:
        capabilities: 80 is Ampere, 89 Ada, 90 Hopper, 100 Blackwell.
        kernels: of tuning.KERNELS, or of tuning.HOPPERS_OWN where tuning.BY_HAND has a tile.
        arithmetics: "half" (bfloat16 stands for float16 too), "tf32", "exact".

    Returns:
        A line each: kernel, arithmetic, d_head, capability, block_m, block_n, num_warps, num_stages, case
        (Tile.case), registers and spilled_bytes (a thread), shared_bytes (a block) and shared_limit (of the
        chip).

    Raises:
        RuntimeError: a configuration does not compile; the message ends with the compiler's.
    """
    work = [
        (*item, capability)
        for capability in capabilities
        for item in itertools.product(kernels, arithmetics, head_sizes)
    ]
    count = max(1, min(len(work), os.cpu_count() or 1))
    processes = [_start(work[first::count]) for first in range(count)]
    lines = {}
    for first, process in enumerate(processes):
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"compiling ahead of time failed: {errors[-2000:]}")
        lines |= zip(range(first, len(work), count), map(json.loads, output.splitlines()), strict=True)
    return pd.DataFrame([line for number in range(len(work)) for line in lines[number]])


def _start(work: list[tuple]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(work)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def shipped(kernel: str, arithmetic: str, d_head: int, capability: int) -> tuple[Tile, ...]:
    """The tiles in the tuning table: one or more, or none where the kernel does not run."""
    place = arithmetic, _block_d(d_head), divmod(capability, 10)
    if kernel in HOPPERS_OWN:
        return tuple(filter(None, [tile_by_hand(kernel, *place)]))
    return tiles_for(kernel, *place)


def _block_d(d_head: int) -> int:
    return max(16, 1 << (d_head - 1).bit_length())


def compile_one(kernel: str, arithmetic: str, d_head: int, capability: int, tile: Tile) -> dict[str, Any]:
    """One line of `resources`, in this process, where TRITON_INTERPRET must not be 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from cs336_systems.attention.hopper_backward import hopper_backward_kernel
    from cs336_systems.attention.hopper_forward import hopper_forward_kernel
    from cs336_systems.attention.triton_backward import dkdv_kernel, dq_kernel
    from cs336_systems.attention.triton_forward import forward_kernel

    portable = forward_kernel, dq_kernel, dkdv_kernel
    functions = (*portable, hopper_forward_kernel, hopper_backward_kernel)
    function = dict(zip((*KERNELS, *HOPPERS_OWN), functions, strict=True))[kernel]
    chip = divmod(capability, 10)
    element = "bf16" if arithmetic == "half" else "fp32"
    block_d = _block_d(d_head)
    constants = {
        "CAUSAL": True,
        "EVEN_KEYS": True,
        "D": d_head,
        "BLOCK_D": block_d,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "DESCRIPTORS": uses_descriptors(chip, arithmetic, block_d),
        "PRECISION": exact_precision(chip) if arithmetic == "exact" else "tf32",
        "CHUNK": tile.chunk,
        "STAGES": tile.num_stages,
        "GLUON": kernel in HOPPERS_OWN,
    }
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if re.fullmatch(r"stride_\w+d", name):
            constants[name] = 1
        signature[name] = "constexpr" if name in constants else _type(name, element, tile, constants)
        if signature[name].startswith(("*", "i32")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if constants["GLUON"] else ASTSource)(
        function,
        signature,
        constexprs={name: value for name, value in constants.items() if name in signature},
        attrs=attributes,
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.maxnreg:
        options["maxnreg"] = tile.maxnreg
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    line = {"kernel": kernel, "arithmetic": arithmetic, "d_head": d_head, "capability": capability}
    line |= {"block_m": tile.block_m, "block_n": tile.block_n, "num_warps": tile.num_warps}
    line |= {"num_stages": tile.num_stages, "case": tile.case}
    line |= _ask_ptxas(compiled.asm["ptx"], capability)
    return line | {"shared_bytes": compiled.metadata.shared, "shared_limit": SHARED_LIMIT[capability]}


def _type(name: str, element: str, tile: Tile, constants: dict[str, Any]) -> str:
    """The type of a kernel's argument, told by its name."""
    from cs336_systems.attention.hopper_launch import row_layout, tile_layout

    if name.endswith("_src") and constants["DESCRIPTORS"]:
        if name in ("lse2_src", "delta_src"):
            return _described("fp32", (1, tile.block_m), row_layout())
        rows = tile.block_n if name in ("k_src", "v_src") else tile.block_m
        shape = (1, 1, rows, constants["BLOCK_D"])
        return _described(element, shape, tile_layout(shape, "bfloat16") if constants["GLUON"] else None)
    if name in ("lse_ptr", "lse2_ptr", "delta_ptr", "sums_ptr"):
        return "*fp32"
    if name.endswith(("_ptr", "_src")):
        return f"*{element}"
    return "fp32" if name.startswith("scale") else "i32"


def _described(element: str, shape: tuple[int, ...], layout: Any) -> str:
    """The type of a descriptor; Gluon's says how a tile lies in shared memory."""
    return f"tensordesc<{element}[{', '.join(map(str, shape))}]{f',{layout!r}' if layout else ''}>"


def _ask_ptxas(ptx: str, capability: int) -> dict[str, int]:
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    architecture = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool.path, "-v", f"-arch={architecture}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said).group(1)),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
    }


if __name__ == "__main__":
    for item in json.loads(sys.argv[1]):
        print(json.dumps([compile_one(*item, tile) for tile in shipped(*item)]), flush=True)
