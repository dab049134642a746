"""What KernelLaunch takes apart of Triton, which on a GPU makes its launches."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from cs336_systems.attention.compile_resources import in_own_process  # noqa: E402
from cs336_systems.attention.kernel_launch import KNOWN_INSIDE, TensorMaps  # noqa: E402

# Launches by the installed Triton, all but its functions in C: its own and ours of the same tensors.
PROGRAM = """
import torch
from types import SimpleNamespace
from triton.backends.nvidia import driver
from cs336_systems.attention.compile_resources import Chip
from cs336_systems.attention.launcher import Launcher, contiguous
from cs336_systems.attention.tiles import Tile, select_tuning

calls = []
def launch(*call):
    calls.append(plain(call))
def plain(x):
    if isinstance(x, (list, tuple)):
        return [plain(each) for each in x]
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    # Hooks, and what they are told, are nothing here.
    return x if isinstance(x, (int, float, str)) else None
driver.PyKernelArg = lambda **annotation: "annotation"
driver.ARG_CONSTEXPR = driver.ARG_KERNEL = driver.ARG_TUPLE = None
driver.library_dirs = list
driver.compile_module_from_src = lambda **module: SimpleNamespace(launch=launch)  # Triton 3.6's
chip = Chip(90)
chip.launcher_cls = driver.CudaLauncher
chip.get_current_stream = lambda device: stream
def encode(address, *block):
    return f"map of {address}"
chip.utils = SimpleNamespace(
    launch=launch, fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode,
    build_signature_metadata=len, load_binary=lambda *binary: (1, 2, 3, 4, 1024),
    get_device_properties=lambda device: {"max_shared_mem": 232448}, unload_module=print,
)
triton.runtime.driver.set_active(chip)
for dtype in json.loads(sys.argv[1]):
    tuning = select_tuning(getattr(torch, dtype), 16, (9, 0), 132).with_tiles(forward=Tile(16, 16, 4, 1))
    x, y = torch.ones(2, 1, 64, 16, dtype=tuning.dtype).split(1)
    run = Launcher([contiguous(x.shape)] * 4, tuning, True, kernels=("forward",)).launches["forward"]
    stream = 0
    run.run(x, x, y, x, x, x)
    stream = 1
    run.run(y, x, x, y, x, y)
    run.run_through_triton(y, x, x, y, x, y)
print(json.dumps(calls))
"""


def test_a_launch_passes_what_tritons_own_passes():
    """For other tensors than the first time, on the stream of now."""
    calls = in_own_process(PROGRAM, ("bfloat16", "float32"))
    assert triton.__version__.startswith(KNOWN_INSIDE)
    for maps, (first, ours, tritons) in ((3, calls[:3]), (0, calls[3:])):
        assert ours == tritons
        assert ours != first
        assert str(ours).count("map of") == maps


@pytest.mark.parametrize(
    "encode",
    [
        lambda described, meta: [(described.base.data_ptr(), meta), "shape"],
        lambda described, meta, base_args: [(described.base.data_ptr(), meta), "shape"],
    ],
    ids=["3.7", "3.8"],
)
def test_a_map_is_made_once_for_an_address(encode, monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    descriptor = SimpleNamespace(base=None)
    maps = TensorMaps(descriptor, "meta", torch.device("cpu"))
    assert maps[128] == (128, "meta")
    assert maps[128] is maps[128]
    assert descriptor.base is None
