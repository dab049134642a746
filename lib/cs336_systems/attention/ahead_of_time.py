"""What the kernels ask of a GPU that need not be there: registers, spills and shared memory, read from ptxas.

Triton compiles for any NVIDIA GPU on a machine with none. It has to run in a process of its own, because in this one
the kernels may be set up for the interpreter.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import pandas as pd

KERNELS = ("forward", "dq", "dkdv")
# Bytes of shared memory a block can have. The portable tiles must also fit Ada, the smallest.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def resources(
    capabilities: Iterable[int] = (80, 90, 100),
    kernels: Iterable[str] = KERNELS,
    dtypes: Iterable[str] = ("bfloat16", "float32"),
    head_sizes: Iterable[int] = (64, 128, 256),
    is_causal: bool = True,
) -> pd.DataFrame:
    """Compile the tiles that the tuning table gives for these, one process a compute capability, side by side.

    Args:
        capabilities: 80 is Ampere, 89 Ada, 90 Hopper, 100 Blackwell.
        dtypes: "bfloat16" stands for float16 too; "float32" is compiled for exact products.

    Returns:
        A line each: kernel, dtype, d_head, capability, block_m, block_n, num_warps, num_stages, registers (a
        thread), spilled_bytes (a thread), shared_bytes (a block), and shared_limit of the chip.

    Raises:
        RuntimeError: a configuration does not compile; the message ends with the compiler's.
    """
    request = [list(kernels), list(dtypes), list(head_sizes), is_causal]
    command = [sys.executable, "-m", __name__]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    processes = [
        subprocess.Popen(
            [*command, json.dumps([capability, *request])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in capabilities
    ]
    lines = []
    for process in processes:
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"compiling ahead of time failed: {errors[-2000:]}")
        lines += [json.loads(line) for line in output.splitlines()]
    return pd.DataFrame(lines)


def _compile_all(capability: int, kernels: list[str], dtypes: list[str], head_sizes: list[int], causal: bool) -> None:
    for kernel in kernels:
        for dtype in dtypes:
            for d_head in head_sizes:
                print(json.dumps(_compile(kernel, dtype, d_head, capability, causal)), flush=True)


def _compile(kernel: str, dtype: str, d_head: int, capability: int, is_causal: bool, tile=None) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import kernels_backward, kernels_forward
    from .tuning import EXACT, tile_for

    function = getattr(kernels_forward if kernel == "forward" else kernels_backward, f"{kernel}_kernel")
    block_d = max(16, triton.next_power_of_2(d_head))
    itemsize = 4 if dtype == "float32" else 2
    tile = tile or tile_for(kernel, itemsize, block_d, divmod(capability, 10))
    constants = {
        "CAUSAL": is_causal,
        "EVEN_KEYS": True,
        "D": d_head,
        "BLOCK_D": block_d,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "DESCRIPTORS": capability >= 90,
        "PRECISION": EXACT if itemsize == 4 else "tf32",
    }
    constants |= {name: 1 for name in function.arg_names if re.fullmatch(r"stride_\w+d", name)}
    element = "fp32" if itemsize == 4 else "bf16"
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr" if name in constants else None
            continue
        signature[name] = _type(name, element, tile, block_d, constants["DESCRIPTORS"])
        if not name.endswith("_src") or not constants["DESCRIPTORS"]:
            if signature[name] != "fp32":
                attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.maxnreg:
        options["maxnreg"] = tile.maxnreg
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel,
        "dtype": dtype,
        "d_head": d_head,
        "capability": capability,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **_ask_ptxas(compiled.asm["ptx"], capability),
        "shared_bytes": compiled.metadata.shared,
        "shared_limit": SHARED_LIMIT[capability],
    }


def _type(name: str, element: str, tile, block_d: int, descriptors: bool) -> str:
    """The type of a kernel's argument, told by its name."""
    if name.endswith("_src") and descriptors:
        rows = tile.block_m if name in ("q_src", "do_src") else tile.block_n
        return f"tensordesc<{element}[1, 1, {rows}, {block_d}]>"
    if name in ("lse_ptr", "lse2_ptr", "delta_ptr"):
        return "*fp32"
    if name.endswith(("_ptr", "_src")):
        return f"*{element}"
    return "fp32" if name.startswith("scale") else "i32"


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
        "serialized": "serialized" in said,
    }


if __name__ == "__main__":
    _compile_all(*json.loads(sys.argv[1]))
