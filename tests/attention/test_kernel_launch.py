"""What KernelLaunch takes apart of Triton, which on a GPU makes its launches."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from cs336_systems.attention.kernel_launch import TensorMaps, replay  # noqa: E402


@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize("packed", [True, False], ids=["3.7", "3.6"])
def test_a_launch_is_replayed_for_other_tensors_on_the_stream_of_now(packed, by_tma, monkeypatch):
    calls = []
    streams = iter(["first", "second"])
    driver = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: (device, next(streams))
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))

    class TritonsLauncher:
        def __init__(self):
            def launcher(*call):
                calls.append(call)

            def of_descriptors(*call):
                launcher("encoded again", *call)

            self.launch = of_descriptors if by_tma else launcher

        def __call__(self, x, y, z, stream, function, metadata, *rest):
            arguments = (rest[3:],) if packed else rest[3:]
            self.launch(x, y, z, stream, function, "scratch", *arguments)

    compiled = SimpleNamespace(
        run=TritonsLauncher(),
        function="function",
        packed_metadata="metadata",
        metadata=SimpleNamespace(tensordesc_meta=["meta"] if by_tma else None),
    )
    x, y = torch.ones(2, 4)
    maps = {x.data_ptr(): "map of x", y.data_ptr(): "map of y"} if by_tma else None
    slots = [(0, maps), (2, None)]
    launch = replay(compiled, (2, 5, 1), [None, "shape", None, "scale"], slots)
    for stream, (first, second) in {"first": (x, y), "second": (y, x)}.items():
        launch(first, second)
        address = first.data_ptr()
        arguments = [maps[address] if by_tma else address, "shape", second.data_ptr(), "scale"]
        passed = [tuple(arguments)] if packed else arguments
        assert calls.pop() == (2, 5, 1, (3, stream), "function", "scratch", *passed)
    assert not calls


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
