"""Which kernels and tiles run, and how they are launched, told without a GPU."""

import dataclasses

import pytest
import torch

from cs336_systems.attention.config import (
    HOPPER_KERNELS,
    HOPPER_TILES,
    INTERPRETER,
    KERNELS,
    Tile,
    select_config,
)
from cs336_systems.checks import AttentionCase, check_attention

pytest.importorskip("triton")
from cs336_systems.attention import FlashAttentionTriton, launcher
from cs336_systems.attention.launcher import (
    Backward,
    HopperBackward,
    KernelLaunch,
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
    config = dataclasses.replace(config, tiles=dict.fromkeys(KERNELS, TILES))
    problem = Problem((QUERIES, KEYS, KEYS), config, is_causal=True)
    assert [problem.tile(kernel) for kernel in KERNELS] == [by_queries, by_queries, by_keys]


@pytest.mark.parametrize(("kernel", "precision"), HOPPER_TILES)
def test_tiles_go_from_large_to_small(kernel, precision):
    side = "block_n" if kernel == "dkdv" else "block_m"
    for tiles in HOPPER_TILES[kernel, precision].values():
        rows = [getattr(tile, side) for tile in tiles]
        assert rows == sorted(set(rows), reverse=True), "else a later one never runs"


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_the_kernels_of_one_head_size_round_scores_alike(d, capability):
    """The backward makes the forward's scores again, and L has to fit them."""
    tiles = select_config(torch.float32, d, capability, 132).tiles
    chunks = {tile.chunk % d for kernel in KERNELS for tile in tiles[kernel]}  # a whole head is one chunk
    assert len(chunks) == 1


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "tf32", "precision", "use_tma", "hopper"),
    [
        (torch.bfloat16, 64, HOPPER, False, "16bit", True, True),
        (torch.float16, 33, HOPPER, True, "16bit", True, True),
        (torch.bfloat16, 32, HOPPER, False, "16bit", True, False),
        (torch.bfloat16, 256, HOPPER, False, "16bit", True, False),
        (torch.bfloat16, 64, AMPERE, False, "16bit", False, False),
        (torch.bfloat16, 64, BLACKWELL, False, "16bit", True, False),
        (torch.float32, 64, HOPPER, False, "ieee", False, False),
        (torch.float32, 64, HOPPER, True, "tf32", True, False),
        (torch.float32, 64, AMPERE, True, "tf32", False, False),
        (torch.float32, 64, INTERPRETER, False, "ieee", True, False),
    ],
)
def test_what_a_gpu_does(dtype, d, capability, tf32, precision, use_tma, hopper):
    config = select_config(dtype, d, capability, 132, tf32)
    assert (config.precision, config.use_tma) == (precision, use_tma)
    assert [kernel in config.tiles for kernel in HOPPER_KERNELS] == [hopper, hopper]


def on_hopper(sm_count, **tiles):
    return select_config(torch.float16, 40, HOPPER, sm_count).with_tiles(**tiles)


def test_hoppers_forward_runs_where_there_is_one():
    assert forward_launcher((HEADS_OF_40,) * 4, on_hopper(1000), True).name == "hopper_forward"
    assert forward_launcher((HEADS_OF_40,) * 4, on_hopper(1, hopper_forward=None), True).name == "forward"


@pytest.mark.parametrize(
    ("sm_count", "deterministic", "chosen"),
    [(24, False, HopperBackward), (25, False, Backward), (24, True, Backward)],
)
def test_hoppers_backward_needs_a_program_for_every_sm_and_repeats_no_bits(sm_count, deterministic, chosen):
    launch = backward_launcher((HEADS_OF_40,) * 8, on_hopper(sm_count), True, deterministic)
    assert type(launch) is chosen


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
    assert backward | {"CAUSAL": is_causal, "EVEN_KEYS": False, "BLOCK_N": 128, "STAGES": 3} == backward
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

        monkeypatch.setattr("cs336_systems.attention.flash_triton.config_for", config_for)

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
