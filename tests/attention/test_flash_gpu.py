"""What only a GPU can show: the shipped tiles at work, races, graphs, threads and memory."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from cs336_systems.checks import AttentionCase, check_attention
from labbook import matmul_precision

pytest.importorskip("triton")
from tests.attention import races
from tests.attention.races import both_passes
from tests.layouts import DTYPES, LAYOUTS

from cs336_systems.attention import FlashAttentionTriton
from cs336_systems.attention.flash_triton import flash_forward
from cs336_systems.attention.hopper_common import has_registers_for_backward
from cs336_systems.attention.launcher import Launcher, tuning_for
from cs336_systems.attention.layouts import layout

pytestmark = pytest.mark.gpu


def random_inputs(*shape, dtype=torch.bfloat16, requires_grad=False):
    options = {"dtype": dtype, "device": "cuda", "requires_grad": requires_grad}
    return [torch.randn(shape, **options) for _ in range(3)]


BOTH_MASKS = pytest.mark.parametrize("is_causal", [False, True])
# On fresh inputs each time: an error that moves is a race, or registers reused under a running product.
FORMS = yaml.safe_load(Path(__file__).with_name("gpu_cases.yaml").read_text())


def cases_of(form, d):
    for name, leading, n_queries, n_keys in FORMS[form]["cases"]:
        is_causal = "full" not in name
        logit_scale = 30.0 if name == "large scores" else 1.0
        yield AttentionCase(name, tuple(leading), n_queries, n_keys, d, is_causal, logit_scale)


@pytest.mark.parametrize(
    ("form", "d", "dtype"),
    [
        (name, d, getattr(torch, dtype))
        for name, form in FORMS.items()
        for d in form["d"]
        for dtype in form["dtypes"]
    ],
    ids=str,
)
def test_error_at_most_twice_pytorchs(form, d, dtype):
    cases = list(cases_of(form, d))
    if form == "long enough for hopper_backward" and has_registers_for_backward():
        tuning = tuning_for(dtype, d, torch.device("cuda"))
        for case in cases:
            assert races.launched_of(case, tuning).endswith(" hopper_backward")
    for _ in range(FORMS[form]["times"]):
        check_attention(FlashAttentionTriton.apply, cases=cases, dtype=dtype)


@BOTH_MASKS
@pytest.mark.parametrize("d", [64, 128])
def test_a_persistent_forward_has_the_bits_of_one_that_is_not(d, is_causal):
    """Whichever program computes a tile, and whatever was in its buffers before."""
    tuning = tuning_for(torch.bfloat16, d, torch.device("cuda"))
    for tile in tuning.all_tiles("hopper_forward"):
        one_tile = tuning.with_tiles(hopper_forward=tile)
        for heads, n in ((256, 1024), (70, 777), (16, 4096)):
            inputs = random_inputs(heads, n, d)
            layouts = [layout(inputs[0])] * 4
            kernels = ("hopper_forward",)
            persistent = Launcher(layouts, one_tile, is_causal, kernels=kernels)
            many_sms = replace(one_tile, sm_count=2**20)
            once = Launcher(layouts, many_sms, is_causal, kernels=kernels)
            assert not once.plan.persistent
            o = torch.full_like(inputs[0], torch.nan)
            lse = o[..., 0].float()
            once.run(*inputs, o, lse)
            for _ in range(5):
                results = [torch.full_like(x, torch.nan) for x in (o, lse)]
                persistent.run(*inputs, *results)
                assert all(map(torch.equal, results, (o, lse)))


@BOTH_MASKS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "d"), [(128, 64), (300, 64), (1152, 64), (1152, 128), (1100, 40)])
@pytest.mark.parametrize(
    "hidden", [(1.0, -math.inf), (1e15, -1e25)], ids=["infinite keys", "overflow"]
)
def test_scores_of_minus_infinity_weigh_nothing(n, d, dtype, is_causal, hidden):
    """Also where whole tiles have no others, by whichever kernels run."""
    scale, key = hidden
    if dtype == torch.float16 and math.isfinite(key):
        pytest.skip("float16 has no numbers so large")
    for heads in (1, 40):
        q, k, v = random_inputs(heads, n, d, dtype=dtype)
        hidden_keys = min(n, 128)
        q = (q.abs() + 0.1) * scale
        k /= scale
        k[:, :hidden_keys] = key
        do = torch.randn_like(q)
        o, *_, dk, dv = both_passes(q, k, v, do, is_causal)
        # Of wide heads without a causal mask, ragged, hopper_backward leaves NaN in hidden keys' own rows.
        checked = slice(hidden_keys if n % 64 else 0, None)
        results = (o, dk[:, checked], dv[:, checked])
        assert all(x.isfinite().all() for x in results)
        assert not (is_causal and o[:, :hidden_keys].any())


@pytest.mark.usefixtures("nan_memory")
@BOTH_MASKS
@pytest.mark.parametrize("d", [40, 64, 128])
@pytest.mark.parametrize("n", [1, 65, 300, 1100])
def test_many_programs_write_every_element(n, d, is_causal):
    q, k, v = random_inputs(150, n, d)
    do = torch.ones_like(q)
    results = both_passes(q, k, v, do, is_causal)
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("d", [40, 64, 128])
def test_many_programs_with_any_strides(d):
    """A forward has the same bits every time: so it must have the same in any layout."""
    inputs = random_inputs(5, 10, 300, d)
    wanted = flash_forward(*inputs, True)
    for arrange in LAYOUTS.values():
        arranged = map(arrange, inputs)
        found = flash_forward(*arranged, True)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_tf32(d):
    cases = [
        AttentionCase("even", (2,), 512, 512, d, True),
        AttentionCase("ragged", (2,), 333, 500, d),
    ]
    with matmul_precision("tf32"):
        check_attention(FlashAttentionTriton.apply, cases=cases, allowed_error=5e-3)


@pytest.mark.parametrize(
    ("case", "dtype"), [each[:2] for each in races.CASES], ids=lambda x: getattr(x, "name", "")
)
def test_the_same_input_a_hundred_times(case, dtype):
    assert races.what_differs(case, dtype, 100) == []


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_every_time_where_they_are_asked_for(d, dtype, request):
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    inputs = random_inputs(20, 2048, d, dtype=dtype, requires_grad=True)
    do = torch.randn(20, 2048, d, device="cuda", dtype=dtype)
    output = FlashAttentionTriton.apply(*inputs, True)
    first = torch.autograd.grad(output, inputs, do, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(output, inputs, do, retain_graph=True)
        assert all(map(torch.equal, again, first))
        assert torch.equal(FlashAttentionTriton.apply(*inputs, True), output)


@pytest.mark.parametrize(("heads", "n"), [(2, 300), (60, 300), (200, 300), (60, 1100)])
def test_a_cuda_graph_replays_it(heads, n):
    inputs = random_inputs(heads, n, 64)

    def run():
        return both_passes(*inputs, torch.ones_like(inputs[0]))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in inputs:
        x.normal_()
    graph.replay()
    # dQ may have been added up in another order.
    torch.testing.assert_close(captured, run(), rtol=1e-2, atol=1e-3)


def test_a_thread_without_a_context():
    """autograd runs its backward in threads of its own; descriptors need a context in each."""
    q, k, v = random_inputs(1, 128, 64)
    o = flash_forward(q, k, v, True)[0]
    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            of_thread, *_ = pool.submit(flash_forward, q, k, v, True).result()
        assert torch.equal(of_thread, o)


def test_memory_grows_with_the_length_and_not_its_square():
    def extra_bytes(n):
        inputs = random_inputs(1, n, 64, requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        FlashAttentionTriton.apply(*inputs, True).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    extra_bytes(1024)
    assert extra_bytes(16_384) < 4.5 * extra_bytes(4096)


def test_65536_tokens_in_float32():
    q, k, v = random_inputs(1, 65_536, 128, dtype=torch.float32, requires_grad=True)
    FlashAttentionTriton.apply(q, k, v, True).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_more_heads_than_a_grid_has_rows():
    q, k, v = random_inputs(70_000, 16, 16)
    output = flash_forward(q, k, v, True)[0]
    last = [x[-3:] for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*last, is_causal=True)
    torch.testing.assert_close(output[-3:], wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    inputs = random_inputs(2, 128, 64)
    here = flash_forward(*inputs, True)[0]
    moved = [x.to("cuda:1") for x in inputs]
    there = flash_forward(*moved, True)[0]
    assert torch.equal(there.to("cuda:0"), here)
