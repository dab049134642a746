"""Which kernels, tiles and splits are chosen, and how they are launched, told without a GPU."""

import inspect

import nbformat
import pytest
import torch

from cs336_systems.attention.choose import Problem, choose
from cs336_systems.attention.tiles import (
    HOPPER_TILES,
    INTERPRETER,
    KERNELS,
    OWN_KEYS,
    select_tuning,
)

pytest.importorskip("triton")
from tests.attention import races

from cs336_systems.attention.hopper_forward import attend
from cs336_systems.attention.launcher import Launcher
from cs336_systems.attention.layouts import kernel_layout, layout, tma_compatible
from labbook.project import project

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
BF16, FP32 = torch.bfloat16, torch.float32
TWO, ONE, OWN, SPLIT3 = (
    ["dq", "dkdv"],
    ["backward"],
    ["hopper_backward"],
    ["bf16x3_dq", "bf16x3_dkdv"],
)


def plan(n, d=64, heads=1, causal=True, dtype=BF16, gpu=HOPPER, sms=132, tf32=False, same=None):
    """same: the bits of a backward pass; None for a forward. n: queries and keys, or both."""
    n_queries, n_keys = n if isinstance(n, tuple) else (n, n)
    tuning = select_tuning(dtype, d, gpu, sms, tf32)
    return choose(
        Problem(1, heads, n_queries, n_keys, causal, same is not None, bool(same)), tuning
    )


# Arguments of `plan`; kernel; queries and keys of its tile; splits; programs, if persistent.
FORWARD = [
    # the largest tile that gives an SM nearly two programs; they share one only where they end together
    (dict(n=300, d=40, heads=8, sms=9), "hopper_forward", (192, 128), 1, 9),
    (dict(n=300, d=40, heads=8, sms=10), "hopper_forward", (64, 128), 1, 20),
    (dict(n=300, d=128, heads=8, sms=13), "hopper_forward", (128, 128), 1, 13),
    (dict(n=300, d=128, heads=8, sms=14, causal=False), "hopper_forward", (64, 64), 1, 28),
    # short sequences, of which there are enough for three programs an SM; persistent
    (dict(n=1024, heads=256), "hopper_forward", (64, 64), 1, 396),
    (dict(n=4097, heads=64), "hopper_forward", (192, 128), 1, 132),
    # its persistent form spills
    (dict(n=1025, heads=256, causal=False), "hopper_forward", (192, 128), 1, None),
    # long ones
    (dict(n=16_384, heads=16), "hopper_forward", (192, 128), 1, 132),
    (
        dict(n=16_384, d=32, heads=16),
        "hopper_forward",
        (192, 128),
        1,
        None,
    ),  # small heads gain nothing
    (dict(n=16_384, heads=1), "forward", (64, 128), 2, None),
    # splits while SMs have no programs; not where what is written would take longer
    (dict(n=512), "hopper_forward", (64, 128), 1, None),
    (dict(n=1024), "forward", (64, 128), 4, None),
    (dict(n=32_768), "hopper_forward", (64, 128), 1, 264),
    (dict(n=1024, heads=4), "hopper_forward", (64, 128), 1, None),
    (dict(n=1024, d=256), "forward", (128, 64), 4, None),
    (dict(n=1024, dtype=FP32, gpu=AMPERE), "forward", (32, 32), 8, None),
    # float32: small tiles for few programs; operands split by bf16x3 for long sequences
    (dict(n=511, dtype=FP32, heads=200), "forward", (64, 64), 1, None),
    (dict(n=100, dtype=FP32, heads=70), "forward", (64, 64), 1, None),
    (dict(n=100, dtype=FP32, heads=20), "forward", (16, 64), 1, None),
    (dict(n=1024, dtype=FP32, sms=142), "bf16x3_forward", (128, 64), 8, None),
    (dict(n=(2048, 1024), dtype=FP32, d=33, heads=16), "bf16x3_forward", (128, 64), 1, None),
    (dict(n=2048, dtype=FP32, d=32, heads=16), "bf16x3_forward", (128, 64), 1, None),
    (dict(n=2047, dtype=FP32, d=32, heads=16), "forward", (64, 64), 2, None),
    (dict(n=4096, dtype=FP32, d=256, heads=16), "forward", (32, 32), 1, None),
    (dict(n=4096, dtype=FP32, heads=16, tf32=True), "forward", (32, 64), 1, None),
    (dict(n=4096, dtype=FP32, heads=16, gpu=AMPERE), "forward", (32, 32), 1, None),
    (dict(n=4096, dtype=FP32, gpu=INTERPRETER, sms=1), "forward", (64, 64), 1, None),
]
# Arguments of `plan`; kernels; splits.
BACKWARD = [
    # Hopper's own: long sequences, a program for every SM, bits that need not be the same every time
    (dict(n=1100, d=40, heads=8, sms=72, same=False), OWN, 1),
    (dict(n=1100, d=40, heads=8, sms=73, same=False), TWO, 1),
    (dict(n=1100, d=40, heads=8, sms=72, same=True), TWO, 1),
    (dict(n=600, d=40, heads=8, sms=24, same=False, causal=False), OWN, 1),
    (dict(n=512, d=40, heads=8, sms=24, same=False, causal=False), TWO, 1),
    (dict(n=769, d=72, heads=8, sms=24, same=False), OWN, 1),
    # few programs go into one launch, split or not; not where they make scores in chunks
    (dict(n=300, d=40, heads=8, sms=40, same=False), ONE, 1),
    (dict(n=512, heads=16, same=False), ONE, 1),
    (dict(n=1024, heads=16, same=False), TWO, 1),
    (dict(n=16_384, same=False), ONE, 2),
    (dict(n=512, d=256, same=False), TWO, 1),
    (dict(n=256, heads=16, dtype=FP32, same=False), TWO, 1),
    (dict(n=256, dtype=FP32, same=False), ONE, 8),
    # as the forward does, or scores would be rounded otherwise
    (dict(n=1024, dtype=FP32, same=False), SPLIT3, 8),
    (dict(n=(2048, 1024), dtype=FP32, d=33, heads=16, same=False), SPLIT3, 2),
    (dict(n=2047, dtype=FP32, d=32, heads=16, same=False), TWO, 1),
    (dict(n=4096, dtype=FP32, heads=16, tf32=True, same=False), TWO, 1),
]


@pytest.mark.parametrize(("case", "kernel", "tile", "splits", "persistent"), FORWARD, ids=str)
def test_forward(case, kernel, tile, splits, persistent):
    chosen = plan(**case)
    ((name, its_tile),) = chosen.tiles.items()
    programs = chosen.programs[name] if chosen.persistent else None
    assert (name, (its_tile.block_m, its_tile.block_n), chosen.splits, programs) == (
        kernel, tile, splits, persistent,
    )  # fmt: skip
    keys = case["n"][1] if isinstance(case["n"], tuple) else case["n"]
    assert splits == 1 or (splits - 1) * chosen.split_size < keys <= splits * chosen.split_size
    assert chosen.split_size % its_tile.block_m == chosen.split_size % its_tile.block_n == 0


@pytest.mark.parametrize(("case", "kernels", "splits"), BACKWARD, ids=str)
def test_backward(case, kernels, splits):
    chosen = plan(**case)
    assert (list(chosen.tiles), chosen.splits) == (kernels, splits)


@pytest.mark.parametrize(("kernel", "precision"), HOPPER_TILES)
def test_tiles_go_from_large_to_small(kernel, precision):
    side = "block_n" if kernel in OWN_KEYS else "block_m"
    for tiles in HOPPER_TILES[kernel, precision].values():
        rows = [(getattr(tile, side), tile.max_registers or 0) for tile in tiles]
        assert rows == sorted(set(rows), reverse=True), "else a later one never runs"


@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_every_tile_of_ieee_runs_for_some_number_of_heads(d):
    tuning = select_tuning(FP32, d, HOPPER, 132)
    for kernel in tuning.tiles.keys() & set(KERNELS):
        problems = [Problem(1, n, 300, 300, True, kernel != "forward") for n in (1, 5, 20, 30, 50)]
        chosen = {choose(problem, tuning, (kernel,)).tiles[kernel] for problem in problems}
        assert chosen == set(tuning.tiles[kernel])


@pytest.mark.parametrize("gpu", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_kernels_of_one_head_size_round_scores_alike(d, gpu):
    """The backward makes the forward's scores again, and L has to fit them."""
    tiles = select_tuning(FP32, d, gpu, 132).tiles
    assert len({tile.chunk % d for kernel in KERNELS for tile in tiles.get(kernel, ())}) == 1


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "tf32"), [(BF16, False), (FP32, True), (FP32, False)])
def test_what_is_chosen_has_a_tile_on_every_gpu(capability, d, dtype, tf32):
    """Which compile: test_compile_resources."""
    gpu = divmod(capability, 10)
    tuning = select_tuning(dtype, d, gpu, 132, tf32)
    sizes = {"heads": 16, "gpu": gpu, "dtype": dtype, "tf32": tf32}
    for same, n in [(None, 128), (None, 8192), (False, 128), (False, 8192), (True, 8192)]:
        chosen = plan(n, d, same=same, **sizes).tiles
        assert all(tile in tuning.all_tiles(kernel) for kernel, tile in chosen.items())
        assert capability == 90 or chosen.keys() <= set(KERNELS)


@pytest.mark.parametrize(
    ("dtype", "d", "gpu", "tf32", "use_tma"),
    [
        (BF16, 256, HOPPER, False, True), (BF16, 64, AMPERE, False, False),
        (BF16, 64, BLACKWELL, False, True), (FP32, 64, HOPPER, False, False),
        (BF16, 128, BLACKWELL, False, True), (BF16, 256, BLACKWELL, False, False),
        (BF16, 64, (12, 0), False, True), (BF16, 128, (12, 0), False, False),
        (FP32, 64, HOPPER, True, True), (FP32, 64, AMPERE, True, False),
        (FP32, 64, INTERPRETER, False, True),
    ],
)  # fmt: skip
def test_tma_loads_where_it_costs_no_registers(dtype, d, gpu, tf32, use_tma):
    assert select_tuning(dtype, d, gpu, 132, tf32).use_tma == use_tma


@pytest.mark.parametrize(
    ("case", "dtype", "launched"), races.CASES, ids=lambda x: getattr(x, "name", "")
)
def test_races_are_looked_for_where_it_says(case, dtype, launched):
    assert races.launched_of(case, select_tuning(dtype, case.d, HOPPER, 132)) == launched


def test_every_argument_is_at_its_place():
    """A compiled kernel takes all its arguments by position."""
    x, transposed = (
        ((2, 4, 1100, 40), (176_000, 44_000, 40, 1)),
        ((2, 4, 1100, 40), (176_000, 40, 160, 1)),
    )
    tuning = select_tuning(torch.float16, 40, HOPPER, 1)
    launches = Launcher([x] * 5 + [transposed, x, transposed], tuning, True).launches
    known = {
        "hopper_backward": {"n_keys": 1100, "STAGES": 3},
        "preprocess": {"do_strides": x[1], "o_strides": x[1], "BLOCK_M": 64, "BLOCK_D": 64},
        "postprocess": {"dq_strides": transposed[1], "scale": 40**-0.5, "n_heads": 4},
    }
    for name, wanted in known.items():
        names, values = launches[name].kernel.arg_names, launches[name].arguments
        found = dict(zip(names[len(names) - len(values) :], values, strict=True))
        assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("shape", [(5, 40, 20), (3, 40, 64), (2, 3, 1, 24)])
def test_kernels_get_what_they_can_load(shape, use_tma):
    """Contiguous tensors, or rows at multiples of 16 bytes; the interpreter would read anything."""
    plain = torch.randn(shape, dtype=torch.float16)
    strided = (
        plain.mT.contiguous().mT,
        torch.stack([plain, plain], -1)[..., 0],
        plain[:1].expand(shape),
    )
    for x in (plain, *strided):
        sizes, strides = kernel_layout(layout(x), 2, use_tma)
        assert tuple(sizes) == shape
        assert kernel_layout((sizes, strides), 2, use_tma) == (sizes, strides)
        x = x.new_empty_strided(sizes, strides)
        assert tma_compatible((sizes, strides), 2) if use_tma else x.is_contiguous()


def test_every_line_that_27_explains_is_in_the_loop_in_this_order():
    """Notebook 27 shows the loop of the Hopper forward line by line: today's loop."""
    (path,) = project().notebooks.glob("27_*.ipynb")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    (table,) = (source.split('"""')[1] for source in cells if source.startswith("BESIDE"))
    loop = inspect.getsource(attend.fn).partition("for _ in range(1, tiles):")[2]
    places = [loop.find(line) for line in table.strip().splitlines() if not line.startswith(" ")]
    assert len(places) > 5
    assert places[0] > 0
    assert places == sorted(places)
