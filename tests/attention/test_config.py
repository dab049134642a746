"""Which kernels and tiles run, and how they are launched, told without a GPU."""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import (
    GLUON_KERNELS,
    HOPPER_TILES,
    INTERPRETER,
    KERNELS,
    OWN_KEYS,
    PLANES_KERNELS,
    Tile,
    select_config,
)
from cs336_systems.checks import AttentionCase, check_attention

pytest.importorskip("triton")
from tests.attention import races

from cs336_systems.attention import FlashAttentionTriton, flash_triton, launcher
from cs336_systems.attention.launcher import (
    Backward,
    Forward,
    HopperBackward,
    HopperForward,
    KernelLaunch,
    OneLaunchBackward,
    Problem,
    backward_launcher,
    config_for,
    forward_launcher,
    layout,
    loadable,
    tma_compatible,
)
from cs336_systems.kernels.runtime import INTERPRETED

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
LARGE, MIDDLE, SMALL = TILES = Tile(64, 128, 4, 2), Tile(32, 64, 8, 2), Tile(16, 32, 4, 1)
QUERIES, KEYS = ((2, 3, 512, 64), (98_304, 32_768, 64, 1)), ((2, 3, 256, 64), (49_152, 16_384, 64, 1))
HEADS_OF_40 = (2, 4, 300, 40), (48_000, 12_000, 40, 1)  # 24 programs of 128 keys


@pytest.mark.parametrize(
    ("sm_count", "by_queries", "by_keys"),
    [
        (12, LARGE, LARGE),  # 6 heads of 8 tiles of queries, 2 tiles of keys
        (13, LARGE, MIDDLE),
        (48, LARGE, SMALL),
        (49, MIDDLE, SMALL),
        (97, SMALL, SMALL),
        (1000, SMALL, SMALL),
    ],
)
def test_the_largest_tile_that_gives_every_sm_a_program(sm_count, by_queries, by_keys):
    config = select_config(torch.float32, 64, HOPPER, sm_count)
    config = dataclasses.replace(config, tiles=dict.fromkeys(KERNELS, TILES), splits={})
    problem = Problem((QUERIES, KEYS, KEYS), config, is_causal=True)
    chosen = [problem.tile(kernel) for kernel in ("forward", "dq", "dkdv")]
    assert chosen == [by_queries, by_queries, by_keys]


@pytest.mark.parametrize(("kernel", "precision"), HOPPER_TILES)
def test_tiles_go_from_large_to_small(kernel, precision):
    side = "block_n" if kernel in OWN_KEYS else "block_m"
    for tiles in HOPPER_TILES[kernel, precision].values():
        rows = [(getattr(tile, side), tile.max_registers or 0) for tile in tiles]
        assert rows == sorted(set(rows), reverse=True), "else a later one never runs"


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_kernels_of_one_head_size_round_scores_alike(d, capability):
    """The backward makes the forward's scores again, and L has to fit them."""
    tiles = select_config(torch.float32, d, capability, 132).tiles
    chunks = {tile.chunk % d for kernel in KERNELS for tile in tiles.get(kernel, ())}  # 0: a whole head
    assert len(chunks) == 1


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "tf32", "precision", "use_tma", "of_hopper"),
    [
        (torch.bfloat16, 64, HOPPER, False, "16bit", True, GLUON_KERNELS),
        (torch.float16, 33, HOPPER, True, "16bit", True, GLUON_KERNELS),
        (torch.bfloat16, 32, HOPPER, False, "16bit", True, GLUON_KERNELS),
        (torch.bfloat16, 256, HOPPER, False, "16bit", True, None),
        (torch.bfloat16, 64, AMPERE, False, "16bit", False, ()),
        (torch.bfloat16, 64, BLACKWELL, False, "16bit", True, ()),
        (torch.float32, 64, HOPPER, False, "ieee", False, PLANES_KERNELS),
        (torch.float32, 32, HOPPER, False, "ieee", False, PLANES_KERNELS),
        (torch.float32, 16, HOPPER, False, "ieee", False, ()),
        (torch.float32, 64, HOPPER, True, "tf32", True, ()),
        (torch.float32, 64, AMPERE, True, "tf32", False, ()),
        (torch.float32, 64, INTERPRETER, False, "ieee", True, ()),
    ],
)
def test_what_a_gpu_does(dtype, d, capability, tf32, precision, use_tma, of_hopper):
    config = select_config(dtype, d, capability, 132, tf32)
    assert (config.precision, config.use_tma) == (precision, use_tma)
    wanted = {"forward", "dq", "dkdv"} if of_hopper is None else {*KERNELS, *of_hopper}
    assert config.tiles.keys() == wanted


def on_hopper(sm_count, **tiles):
    return select_config(torch.float16, 40, HOPPER, sm_count).with_tiles(**tiles)


def test_hoppers_forward_runs_where_there_is_one():
    assert type(forward_launcher((HEADS_OF_40,) * 4, on_hopper(1000), True)) is HopperForward
    assert type(forward_launcher((HEADS_OF_40,) * 4, on_hopper(1, hopper_forward=None), True)) is Forward


@pytest.mark.parametrize(("sm_count", "queries"), [(9, 192), (10, 64), (1000, 64)])
def test_hoppers_forward_has_nearly_two_programs_for_every_sm(sm_count, queries):
    """8 heads of 300 queries: 16 programs of 192, 40 of 64."""
    launch = HopperForward((HEADS_OF_40,) * 4, on_hopper(sm_count), True)
    assert launch.tile("hopper_forward").block_m == queries
    assert [descriptor.block_shape[2] for descriptor in launch.launch.descriptors] == [64, 128, 128]


@pytest.mark.parametrize(
    ("sm_count", "is_causal", "tile"),
    [(13, True, (128, 128)), (14, False, (64, 64)), (14, True, (64, 128)), (1000, False, (64, 128))],
)
def test_programs_share_an_sm_only_where_they_end_together(sm_count, is_causal, tile):
    """8 heads of 300 queries, of 128 numbers each: 24 programs of 128, 40 of 64."""
    heads = (1, 8, 300, 128), (8 * 300 * 128, 300 * 128, 128, 1)
    config = select_config(torch.bfloat16, 128, HOPPER, sm_count)
    chosen = HopperForward((heads,) * 4, config, is_causal).tile("hopper_forward")
    assert (chosen.block_m, chosen.block_n) == tile


def test_an_old_triton_has_no_kernels_of_hoppers_own(monkeypatch):
    monkeypatch.setattr(launcher, "capability", lambda device: HOPPER)
    monkeypatch.setattr(launcher, "sm_count", lambda device: 132)
    monkeypatch.setattr(launcher.triton, "__version__", "3.5.1")
    with pytest.warns(UserWarning, match=r"3\.5\.1 is older than 3\.6"):
        config = config_for.__wrapped__(torch.bfloat16, 64, torch.device("cuda", 0))
    assert config.tiles.keys() == set(KERNELS)
    monkeypatch.setattr(launcher.triton, "__version__", "3.10.0")
    config = config_for.__wrapped__(torch.bfloat16, 64, torch.device("cuda", 0))
    assert config.tiles.keys() == {*KERNELS, *GLUON_KERNELS}


def heads_of(n, d, heads):
    """The layout of q, k and v, each contiguous."""
    return (1, heads, n, d), (heads * n * d, n * d, d, 1)


@pytest.mark.parametrize(
    ("n", "d", "heads", "is_causal", "tile"),
    [
        (1024, 64, 256, True, (64, 64)),
        (4096, 64, 64, True, (64, 64)),
        (4097, 64, 64, True, (192, 128)),
        (1024, 64, 256, False, (64, 64)),
        (1025, 64, 256, False, (192, 128)),
        (1024, 64, 43, True, (192, 128)),  # 688 programs of 64 queries: not enough for three an SM
        (2048, 128, 128, True, (64, 64)),
        (2049, 128, 128, True, (128, 128)),
        (512, 128, 512, False, (64, 64)),
        (513, 128, 512, False, (128, 128)),
    ],
)
def test_short_walks_have_a_tile_of_their_own(n, d, heads, is_causal, tile):
    config = select_config(torch.bfloat16, d, HOPPER, 132)
    chosen = HopperForward((heads_of(n, d, heads),) * 4, config, is_causal).tile("hopper_forward")
    assert (chosen.block_m, chosen.block_n) == tile


@pytest.mark.parametrize(
    ("n", "d", "heads", "is_causal", "programs"),
    [
        (1024, 64, 256, True, 3 * 132),
        (1024, 128, 256, True, 2 * 132),
        (8192, 128, 16, False, 132),
        (16_384, 64, 16, True, 132),
        (16_384, 32, 16, True, 86 * 16),  # small heads, long walks: a program for every item
        (1024, 32, 256, True, 3 * 132),
        (8191, 64, 16, False, 43 * 16),  # its persistent form spills
        (8191, 64, 16, True, 132),
        (16_384, 64, 1, True, 256),  # fewer items than fit on the GPU
    ],
)
def test_persistent_programs_fill_the_gpu_once(n, d, heads, is_causal, programs):
    config = select_config(torch.bfloat16, d, HOPPER, 132)
    forward = HopperForward((heads_of(n, d, heads),) * 4, config, is_causal)
    launch = forward.launch
    arguments = dict(zip(launch.kernel.arg_names[-len(launch.arguments) :], launch.arguments, strict=True))
    queries = forward.tile("hopper_forward").block_m
    assert launch.grid == (programs, 1, 1)
    assert arguments["items"] == -(-n // queries) * heads
    assert arguments["PERSISTENT"] == forward.persistent == (programs < arguments["items"])


@pytest.mark.parametrize(
    ("n", "is_causal", "sm_count", "deterministic", "chosen"),
    [
        (1100, True, 72, False, HopperBackward),
        (1100, True, 73, False, Backward),
        (1100, True, 72, True, Backward),
        (1024, True, 24, False, Backward),  # a short walk
        (600, False, 24, False, HopperBackward),
        (512, False, 24, False, Backward),
        (300, True, 40, False, OneLaunchBackward),  # 80 programs of 64 queries or keys
    ],
)
def test_hoppers_backward_needs_long_walks_and_a_program_for_every_sm_and_repeats_no_bits(
    n, is_causal, sm_count, deterministic, chosen
):
    """8 heads: of 1,100 keys 72 programs."""
    launch = backward_launcher((heads_of(n, 40, 8),) * 8, on_hopper(sm_count), is_causal, deterministic)
    assert type(launch) is chosen


@pytest.mark.parametrize(("case", "dtype", "launchers"), races.CASES, ids=lambda x: getattr(x, "name", ""))
def test_races_are_looked_for_where_it_says(case, dtype, launchers):
    config = select_config(dtype, case.d, HOPPER, sm_count=132)
    assert races.launchers_of(case, config) == launchers


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_argument_is_at_its_place(is_causal, monkeypatch):
    """A compiled kernel takes all its arguments by position."""
    seen = []

    class Recorder(KernelLaunch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            names = self.kernel.arg_names
            seen.append(dict(zip(names[len(names) - len(self.arguments) :], self.arguments, strict=True)))

    monkeypatch.setattr(launcher, "KernelLaunch", Recorder)
    transposed = (2, 4, 300, 40), (48_000, 40, 160, 1)
    HopperBackward((HEADS_OF_40,) * 5 + (transposed, HEADS_OF_40, transposed), on_hopper(1), is_causal)
    backward, preprocess, postprocess = seen
    assert backward | {"stride_dkn": 40, "stride_dvn": 160, "n_heads": 4, "n_keys": 300, "D": 40} == backward
    assert backward | {"CAUSAL": is_causal, "BLOCK_N": 128, "STAGES": 3} == backward
    assert preprocess | {"stride_don": 40, "BLOCK_M": 64, "BLOCK_D": 64} == preprocess
    assert postprocess | {"stride_dqn": 160, "stride_dqh": 40, "scale": 40**-0.5} == postprocess


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("shape", [(5, 40, 20), (3, 40, 64), (2, 3, 1, 24)])
def test_kernels_get_what_they_can_load(shape, use_tma):
    """Contiguous tensors, or rows at multiples of 16 bytes; the interpreter would read anything."""
    plain = torch.randn(shape, dtype=torch.float16)
    strided = plain.mT.contiguous().mT, torch.stack([plain, plain], -1)[..., 0], plain[:1].expand(shape)
    for x in (plain, *strided):
        sizes, strides = loadable(layout(x), 2, use_tma)
        assert tuple(sizes) == shape
        assert loadable((sizes, strides), 2, use_tma) == (sizes, strides)
        x = x.new_empty_strided(sizes, strides)
        assert tma_compatible((sizes, strides), 2) if use_tma else x.is_contiguous()


@pytest.fixture
def by_pointers(monkeypatch):
    """config_for as on a GPU without TMA; optionally with one tile for all kernels."""

    def use(tile=None):
        def config_for(*arguments):
            config = dataclasses.replace(original(*arguments), use_tma=False)
            return config.with_tiles(**dict.fromkeys(KERNELS, tile)) if tile else config

        monkeypatch.setattr(flash_triton, "config_for", config_for)
        monkeypatch.setattr(flash_triton, "_forwards", {})
        monkeypatch.setattr(flash_triton, "_backwards", {})

    original = config_for
    return use


@pytest.mark.skipif(not INTERPRETED, reason="a GPU decides by itself whether it has TMA")
def test_without_tma(by_pointers):
    def transposed(q, k, v, is_causal):
        return FlashAttentionTriton.apply(*(x.mT.contiguous().mT for x in (q, k, v)), is_causal)

    by_pointers()
    causal = AttentionCase("causal", (2,), 100, 70, 24, is_causal=True)
    check_attention(transposed, cases=[causal, AttentionCase("full", (2,), 40, 64, 64)])
    check_attention(FlashAttentionTriton.apply, cases=[causal])


@pytest.mark.parametrize("d", [24, 64])
def test_scores_in_chunks_are_the_same(d, by_pointers):
    by_pointers(Tile(32, 64, 4, 1, chunk=16))
    cases = AttentionCase("causal", (2,), 80, 80, d, is_causal=True), AttentionCase("full", (2,), 40, 70, d)
    check_attention(FlashAttentionTriton.apply, cases=cases)
