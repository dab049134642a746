"""What the kernels ask of a GPU that need not be there: registers, spills and shared memory, read from ptxas.

Triton compiles for any NVIDIA GPU on a machine with none. It does so in processes of its own, because in this
one the kernels may be set up for the interpreter.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing.pool import ThreadPool
from typing import Any

from cs336_systems.attention.config import HOPPER_KERNELS, KERNELS, KernelConfig, Tile, select_config
from cs336_systems.names import torch_dtype

# Bytes of shared memory that a block can have. 80 is Ampere, 89 Ada, 90 Hopper, 100 Blackwell.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def config_for_capability(dtype: str, d_head: int, capability: int) -> KernelConfig:
    """The configuration of a GPU of this capability (90 for Hopper) for one of names.DTYPES."""
    return select_config(torch_dtype(dtype), d_head, divmod(capability, 10), 1, dtype == "tf32")


def compile_tiles(work: Iterable[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """Compile the shipped tiles, causal, in as many processes as there are cores.

    Args:
        work: (kernel, dtype, d_head, capability) of each.

    Returns:
        A row of table kernel_resources for each tile, in the order of the work: registers and spilled_bytes
        of a thread, shared_bytes of a block and what the chip has. None where the kernel does not run.

    Raises:
        RuntimeError: a tile does not compile; the message ends with the compiler's.
    """
    work = list(work)
    count = max(1, min(len(work), os.cpu_count() or 1))
    found: list[list[dict[str, Any]]] = [[] for _ in work]
    with ThreadPool(count) as pool:
        for first, rows in enumerate(pool.imap(_compile_elsewhere, (work[i::count] for i in range(count)))):
            found[first::count] = rows
    return [row for rows in found for row in rows]


def _compile_elsewhere(work: list[tuple[str, str, int, int]]) -> list[list[dict[str, Any]]]:
    command = [sys.executable, "-m", __name__, json.dumps(work)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"compiling ahead of time failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def compile_one(kernel: str, dtype: str, d_head: int, capability: int, tile: Tile) -> dict[str, Any]:
    """One row of `compile_tiles`, in this process, where TRITON_INTERPRET must not be 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from cs336_systems.attention.launcher import Problem

    function, config = _function(kernel), config_for_capability(dtype, d_head, capability)
    rows = tile.block_m * tile.block_n  # whole tiles
    layouts = [((rows, d_head), (d_head, 1))] * 3
    arguments = Problem(layouts, config, is_causal=True).arguments(tile)
    constants = {name: arguments[name] for name in function.arg_names if name.isupper()}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if re.fullmatch(r"stride_\w+d", name):
            constants[name] = 1
        signature[name] = "constexpr" if name in constants else _type(name, kernel, config, tile)
        if signature[name].startswith(("*", "i32")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel in HOPPER_KERNELS else ASTSource
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers:
        options["maxnreg"] = tile.max_registers
    compiled = triton.compile(
        kind(function, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    key = {"kernel": kernel, "dtype": dtype, "d_head": d_head, "capability": capability}
    return (
        key
        | tile.row()
        | _ask_ptxas(compiled.asm["ptx"], capability)
        | {"shared_bytes": compiled.metadata.shared, "shared_limit_bytes": SHARED_LIMIT[capability]}
    )


def _function(kernel: str) -> Any:
    from cs336_systems.attention.hopper_backward import hopper_backward_kernel
    from cs336_systems.attention.hopper_forward import hopper_forward_kernel
    from cs336_systems.attention.triton_backward import dkdv_kernel, dq_kernel
    from cs336_systems.attention.triton_forward import forward_kernel

    functions = forward_kernel, dq_kernel, dkdv_kernel, hopper_forward_kernel, hopper_backward_kernel
    return dict(zip((*KERNELS, *HOPPER_KERNELS), functions, strict=True))[kernel]


def _type(name: str, kernel: str, config: KernelConfig, tile: Tile) -> str:
    """The type of a kernel's argument, told by its name."""
    from cs336_systems.attention.launcher import row_layout, tile_layout

    element = "bf16" if config.precision == "16bit" else "fp32"
    if name.endswith("_src") and config.use_tma:
        if name in ("lse2_src", "delta_src"):
            return _descriptor_type("fp32", (1, tile.block_m), row_layout())
        rows = tile.block_n if name in ("k_src", "v_src") else tile.block_m
        shape = (1, 1, rows, config.block_d)
        gluon = kernel in HOPPER_KERNELS
        return _descriptor_type(element, shape, tile_layout(shape, config.dtype) if gluon else None)
    if name in ("lse_ptr", "lse2_ptr", "delta_ptr", "dq_accum_ptr"):
        return "*fp32"
    if name.endswith(("_ptr", "_src")):
        return f"*{element}"
    return "fp32" if name.startswith("scale") else "i32"


def _descriptor_type(element: str, shape: tuple[int, ...], layout: Any) -> str:
    """Gluon's says how a tile lies in shared memory."""
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
    found = [
        [compile_one(kernel, *place, tile) for tile in config_for_capability(*place).tiles.get(kernel, ())]
        for kernel, *place in json.loads(sys.argv[1])
    ]
    print(json.dumps(found))
