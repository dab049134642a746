"""Which kernels, tiles and splits are chosen, and how they are launched, told without a GPU."""

import inspect
import itertools
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
import torch

from cs336_systems.attention.choose import Problem, choose
from cs336_systems.attention.tiles import (
    HOPPER_TILES,
    KERNELS,
    OWN_KEYS,
    select_tuning,
)

pytest.importorskip("triton")
from tests.attention import races

from cs336_systems.attention import hopper_common, launcher
from cs336_systems.attention.hopper_forward import attend
from cs336_systems.attention.launcher import Launcher
from cs336_systems.attention.layouts import kernel_layout, layout, tma_compatible
from labbook.project import project

HOPPER = (9, 0)
AMPERE = (8, 0)
BLACKWELL = (10, 0)
BF16 = torch.bfloat16
FP32 = torch.float32
# programs: of a persistent kernel. same: gradients have the same bits every time.
PLANS = pd.read_csv(Path(__file__).with_name("plans.csv"), comment="#", dtype={"gpu": str})


@pytest.mark.parametrize(
    "row", list(PLANS.itertuples()), ids=lambda row: f"{row.kernels} {row.Index}"
)
def test_a_plan(row):
    backward = row.pass_ == "backward"
    capability = tuple(map(int, row.gpu.split(".")))
    tuning = select_tuning(getattr(torch, row.dtype), row.d, capability, row.sms, row.tf32)
    sizes = row.n_queries, row.n_keys, row.causal, backward, row.same
    plan = choose(Problem(1, row.heads, *sizes), tuning)
    assert " ".join(plan.tiles) == row.kernels
    assert plan.splits == row.splits
    if backward:
        return
    ((kernel, tile),) = plan.tiles.items()
    programs = plan.programs[kernel] if plan.persistent else 0
    assert programs == row.programs
    assert f"{tile.block_m}x{tile.block_n}" == row.tile
    split = plan.split_size
    assert row.splits == 1 or (row.splits - 1) * split < row.n_keys <= row.splits * split
    assert split % tile.block_m == split % tile.block_n == 0


@pytest.mark.parametrize(("kernel", "precision"), HOPPER_TILES)
def test_tiles_go_from_large_to_small(kernel, precision):
    side = "block_n" if kernel in OWN_KEYS else "block_m"
    for tiles in HOPPER_TILES[kernel, precision].values():
        rows = [(getattr(tile, side), tile.max_registers) for tile in tiles]
        from_large = sorted(set(rows), reverse=True)
        assert rows == from_large, "else a later one never runs"


@pytest.mark.parametrize("gpu", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_kernels_of_one_head_size_round_scores_alike(d, gpu):
    """The backward makes the forward's scores again, and L has to fit them."""
    tiles = select_tuning(FP32, d, gpu, 132).tiles
    of_all = [tile for kernel in KERNELS for tile in tiles.get(kernel, ())]
    chunks = {tile.chunk % d for tile in of_all}
    assert len(chunks) == 1


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "tf32"), [(BF16, False), (FP32, True), (FP32, False)])
def test_what_is_chosen_has_a_tile_on_every_gpu(capability, d, dtype, tf32):
    """Which compile: test_compile_resources."""
    tuning = select_tuning(dtype, d, divmod(capability, 10), 132, tf32)
    for backward, same, n in itertools.product((False, True), (False, True), (128, 8192)):
        chosen = choose(Problem(1, 16, n, n, True, backward, same), tuning).tiles
        assert all(tile in tuning.all_tiles(kernel) for kernel, tile in chosen.items())
        assert capability == 90 or chosen.keys() <= set(KERNELS)


@pytest.mark.parametrize(
    ("gpu", "dtype", "d", "tf32", "use_tma"),
    [
        (HOPPER, BF16, 256, False, True),
        (AMPERE, BF16, 64, False, False),
        (BLACKWELL, BF16, 128, False, True),
        (BLACKWELL, BF16, 256, False, False),
        (HOPPER, FP32, 64, True, True),
        (AMPERE, FP32, 64, True, False),
        (HOPPER, FP32, 64, False, False),
    ],
)
def test_tma_loads_where_it_costs_no_registers(gpu, dtype, d, tf32, use_tma):
    assert select_tuning(dtype, d, gpu, 132, tf32).use_tma == use_tma


@pytest.mark.parametrize(
    ("case", "dtype", "launched"), races.CASES, ids=lambda x: getattr(x, "name", "")
)
def test_races_are_looked_for_where_it_says(case, dtype, launched):
    tuning = select_tuning(dtype, case.d, HOPPER, 132)
    assert races.launched_of(case, tuning) == launched


@pytest.mark.parametrize(("version", "runs"), [("12.9", True), ("13.4", False)])
def test_a_backward_that_lacks_registers_does_not_run_and_says_so_once(
    version, runs, monkeypatch, capsys
):
    monkeypatch.setattr(hopper_common, "get_ptxas", lambda _: SimpleNamespace(version=version))
    fresh = cache(hopper_common.has_registers_for_backward.__wrapped__)
    monkeypatch.setattr(launcher, "has_registers_for_backward", fresh)
    monkeypatch.setattr(launcher, "capability", lambda _: HOPPER)
    monkeypatch.setattr(launcher, "sm_count", lambda _: 132)
    for d in (64, 128):
        tiles = launcher.tuning_for.__wrapped__(BF16, d, torch.device("cuda")).tiles
        assert ("hopper_backward" in tiles) == runs
        assert tiles.keys() >= {"hopper_forward", "dq", "dkdv"}
    assert capsys.readouterr().err.count("ptxas 13.4") == (not runs)


def test_every_argument_is_at_its_place():
    """A compiled kernel takes all its arguments by position."""
    shape = (2, 4, 1100, 40)
    strides = (176_000, 44_000, 40, 1)
    transposed = (176_000, 40, 160, 1)
    x = shape, strides
    y = shape, transposed
    tuning = select_tuning(torch.float16, 40, HOPPER, 1)
    launches = Launcher([x] * 5 + [y, x, y], tuning, True).launches
    known = {
        "hopper_backward": {"n_keys": 1100, "STAGES": 3},
        "preprocess": {"do_strides": strides, "BLOCK_M": 64, "BLOCK_D": 64},
        "postprocess": {"dq_strides": transposed, "scale": 40**-0.5, "n_heads": 4},
    }
    for name, wanted in known.items():
        values = launches[name].arguments
        names = launches[name].kernel.arg_names[-len(values) :]
        found = dict(zip(names, values, strict=True))
        assert found.items() >= wanted.items()


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
    for x in (plain,) + strided:
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
    lines = table.strip().splitlines()
    places = [loop.find(line) for line in lines if not line.startswith(" ")]
    assert len(places) > 5
    assert places[0] > 0
    assert places == sorted(places)
