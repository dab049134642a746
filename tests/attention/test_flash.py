"""Both FlashAttentions: right everywhere, and well-behaved under everything that PyTorch does to a function.

Runs on the GPU where there is one; elsewhere the Triton kernels go through the interpreter.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import IMPLEMENTATIONS, FlashAttentionPyTorch, _fastest, attention
from cs336_systems.attention.plain import reference_attention
from cs336_systems.checks.attention_checks import EVERYTHING, check_attention, check_logsumexp
from cs336_systems.measure.timing import matmul_precision

pytest.importorskip("triton")
from cs336_systems.attention import (
    FlashAttentionTriton,
    flash_triton,
)
from cs336_systems.attention import (
    launch_plans as plans,
)
from cs336_systems.attention import (
    launcher as launch,
)
from cs336_systems.attention.flash_triton import flash_backward, flash_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("flash", [FlashAttentionPyTorch, FlashAttentionTriton])


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_inputs(*leading, n=64, n_keys=None, d=32, dtype=torch.float32):
    shapes = [(*leading, n, d), (*leading, n_keys or n, d), (*leading, n_keys or n, d)]
    return [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]


def every_second(x):
    return torch.empty(*x.shape[:-1], 2 * x.shape[-1], device=x.device, dtype=x.dtype)[..., ::2].copy_(x)


def off_alignment(x):
    return torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)[1:].view(x.shape).copy_(x)


# The same numbers in every layout that an attention function meets.
LAYOUTS = {
    "heads between queries and head size": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "head size first": lambda x: x.mT.contiguous().mT,
    "every second element": every_second,
    "one element off alignment": off_alignment,
}


def gradients(flash, inputs, do, is_causal=True):
    output = flash.apply(*inputs, is_causal)
    return output.detach(), *torch.autograd.grad(output, inputs, do)


def agree(ours, wanted):
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_at_most_twice_pytorchs(flash, dtype):
    check_attention(flash.apply, cases=EVERYTHING, dtype=dtype, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU decides by itself whether it has a copy engine")
@pytest.mark.parametrize("layout", [torch.clone, off_alignment, lambda x: x.mT.contiguous().mT])
def test_without_a_copy_engine(layout, monkeypatch):
    """Where tiles are loaded by pointers, as on Ampere."""
    monkeypatch.setattr(plans, "uses_descriptors", lambda *_: False)
    plans.way_for.cache_clear()
    try:
        check_attention(
            lambda q, k, v, is_causal: FlashAttentionTriton.apply(*map(layout, (q, k, v)), is_causal),
            cases=EVERYTHING[3:14:2],
        )
    finally:
        plans.way_for.cache_clear()


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("shape", [(5, 40, 20), (3, 40, 64), (2, 3, 1, 24)])
def test_kernels_get_what_they_can_read(shape, descriptors):
    """Contiguous tensors, or rows at multiples of 16 bytes; the interpreter would read anything."""
    for name, change in LAYOUTS.items():
        x = launch.aligned(change(torch.randn(shape, dtype=torch.float16)))
        if not launch.readable(launch.layout(x), x.element_size(), descriptors):
            copy = launch.readable_copy(x, descriptors)
            assert launch.layout(copy) == launch.layout_of_copy(x.shape, x.element_size(), descriptors)
            assert launch.readable(launch.layout(copy), copy.element_size(), descriptors), name
            assert torch.equal(copy, x)
            x = copy
        assert x.data_ptr() % launch.ALIGNMENT == 0, name
        rows = [n * x.element_size() for n, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
        assert all(n % launch.ALIGNMENT == 0 for n in rows) if descriptors else x.is_contiguous(), name


@both
@pytest.mark.parametrize("is_causal", [False, True])
def test_saves_one_logsumexp(flash, is_causal):
    check_logsumexp(flash.apply, is_causal=is_causal)


@both
def test_a_single_key_has_weight_one(flash):
    q, k, v = random_inputs(2, n=5, n_keys=1)
    output, dq, dk, dv = gradients(flash, (q, k, v), torch.ones_like(q))
    agree([output, dv], [v.expand_as(output), torch.full_like(v, 5)])
    assert dq.abs().max() < 1e-5
    assert dk.abs().max() < 1e-5


@both
def test_sequences_of_a_batch_do_not_mix(flash):
    q, k, v = random_inputs(3)
    with torch.no_grad():
        together = flash.apply(q, k, v, True)
        apart = [flash.apply(q[i], k[i], v[i], True) for i in range(3)]
    torch.testing.assert_close(together, torch.stack(apart))


@both
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides(flash, layout):
    contiguous = [x.detach() for x in random_inputs(2, 2, n=40, d=16)]
    do = torch.randn_like(contiguous[0])
    wanted = gradients(flash, [x.clone().requires_grad_() for x in contiguous], do)
    inputs = [layout(x).requires_grad_() for x in contiguous]
    agree(gradients(flash, inputs, layout(do)), wanted)


@both
def test_expanded_inputs_and_gradient(flash):
    q, k, v = (x.detach() for x in random_inputs(2, n=40))
    inputs = [q.requires_grad_(), k[:1].expand_as(k).requires_grad_(), v[:, :1].expand_as(v).requires_grad_()]
    do = torch.ones((), device=DEVICE).expand_as(q)  # what sum().backward() sends
    wanted = gradients(flash, [x.detach().contiguous().requires_grad_() for x in inputs], do.contiguous())
    agree(gradients(flash, inputs, do), wanted)


@both
@pytest.mark.parametrize("shape", [(2, 3, 40, 16), (2, 1, 3, 40, 16)])
def test_output_and_gradients_keep_the_shape(flash, shape):
    inputs = random_inputs(*shape[:-2], n=shape[-2], d=shape[-1])
    results = gradients(flash, inputs, torch.ones_like(inputs[0]))
    assert [x.shape for x in results] == [shape] * 4


@both
def test_backward_twice_through_one_graph(flash):
    q, k, v = random_inputs(2)
    output = flash.apply(q, k, v, True)
    first = torch.autograd.grad(output.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(output.sum(), (q, k, v))
    agree(first, second)


@both
def test_gradient_of_a_gradient_is_refused(flash):
    q, k, v = random_inputs(1, n=16)
    do = torch.ones_like(q, requires_grad=True)
    (dq,) = torch.autograd.grad(flash.apply(q, k, v), q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@both
def test_gradient_checkpointing(flash):
    inputs, do = random_inputs(2), torch.randn(2, 64, 32, device=DEVICE)
    output = checkpoint(lambda q, k, v: flash.apply(q, k, v, True), *inputs, use_reentrant=False)
    agree(torch.autograd.grad(output, inputs, do), gradients(flash, inputs, do)[1:])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(flash, dtype):
    q, k, v = random_inputs(2)
    with torch.autocast(DEVICE, dtype=dtype):
        output = flash.apply(q, k, v.to(dtype), True)
    assert output.dtype == dtype
    grads = torch.autograd.grad(output.float().sum(), (q, k, v))
    assert {grad.dtype for grad in grads} == {torch.float32}
    wanted = reference_attention(*(x.to(dtype).float() for x in (q, k, v)), True).to(dtype)
    torch.testing.assert_close(output, wanted, rtol=1e-2, atol=1e-2)


@both
def test_compiles_without_a_graph_break(flash):
    torch.compiler.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"  # without a C++ compiler's ten seconds
    compiled = torch.compile(flash.apply, fullgraph=True, backend=backend)
    inputs = random_inputs(2)
    do = torch.ones((), device=DEVICE).expand_as(inputs[0])
    output = compiled(*inputs, True)
    agree([output, *torch.autograd.grad(output, inputs, do)], gradients(flash, inputs, do))


def test_same_bits_every_time():
    inputs, do = random_inputs(2, n=100), torch.randn(2, 100, 32, device=DEVICE)
    first, second = gradients(FlashAttentionTriton, inputs, do), gradients(FlashAttentionTriton, inputs, do)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("n", [1, 37, 64])
def test_every_element_is_written(n, monkeypatch):
    """Whatever memory the outputs start from, nothing of it is left: here every new tensor starts as NaN."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    q, k, v = (x.detach() for x in random_inputs(2, n=n, n_keys=90, d=24))
    output, logsumexp = flash_forward(q, k, v, True)
    results = [output, logsumexp, *flash_backward(torch.ones_like(q), q, k, v, output, logsumexp, True)]
    assert all(x.isfinite().all() for x in results)


@both
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (None, k, v), TypeError, "are NoneType, Tensor, Tensor; allowed: three tensors"),
        (lambda q, k, v: (q, k.tolist(), v), TypeError, "are Tensor, list, Tensor; allowed"),
        (lambda q, k, v: (q.double(), k, v), TypeError, "torch.float64"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), ValueError, "meta"),
        (lambda q, k, v: (x.to("meta") for x in (q, k, v)), ValueError, "q is on meta; allowed: a dev"),
        (lambda q, k, v: (q[0], k, v), ValueError, r"\(16, 32\)"),
        (lambda q, k, v: (q, k, v[:, :3]), ValueError, r"\(2, 3, 32\)"),
        (lambda q, k, v: (q[..., :8], k, v), ValueError, r"\(2, 16, 8\)"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), ValueError, "size 0"),
        (lambda q, k, v: (x.repeat(1, 1, 9) for x in (q, k, v)), ValueError, "at most 256"),
    ],
)
def test_a_mistake_is_named(flash, change, error, message):
    q, k, v = change(*(x.detach() for x in random_inputs(2, n=16)))
    with pytest.raises(error, match=message):
        flash.apply(q, k, v)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_front_door(implementation):
    q, k, v = (x.detach() for x in random_inputs(2, 2, n=20, n_keys=30))
    output = attention(q, k, v, is_causal=True, implementation=implementation)
    agree([output], [reference_attention(q, k, v, True)])


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_front_door_takes_tensors(implementation):
    q, k, _ = random_inputs(1)
    with pytest.raises(TypeError, match="q, k, v are Tensor, Parameter, NoneType; allowed: three tensors"):
        attention(q, torch.nn.Parameter(k), None, implementation=implementation)


@pytest.mark.parametrize(("n", "n_keys"), [(0, 0), (0, 8), (8, 0)])
def test_automatic_takes_empty_tensors_too(n, n_keys, monkeypatch):
    monkeypatch.setattr("cs336_systems.attention.HAS_TRITON", True)
    q, k = (SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(2, x, 32)) for x in (n, n_keys))
    assert _fastest(q, k) == "sdpa"


def test_front_door_lists_the_names():
    with pytest.raises(ValueError, match="auto, reference, sdpa, flash_pytorch, flash_triton"):
        attention(*random_inputs(1), implementation="flash")


@pytest.fixture
def _switches_restored():
    with matmul_precision("float32"):
        yield


@pytest.mark.usefixtures("_switches_restored")
@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("high", True), ("medium", True)])
def test_float32_follows_pytorchs_switch(precision, tf32):
    torch.set_float32_matmul_precision(precision)
    assert flash_triton.allows_tf32(torch.float32) == tf32
    assert not flash_triton.allows_tf32(torch.bfloat16)


@pytest.mark.usefixtures("_switches_restored")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_newer_switch_will_do(dtype):
    """After it, the older one refuses to answer."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert flash_triton.allows_tf32(dtype) == (dtype == torch.float32)
    q, k, v = (x.to(dtype) for x in random_inputs(1))
    assert attention(q, k, v, implementation="flash_triton").isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "tf32", "kind"),
    [(torch.float32, False, "exact"), (torch.float32, True, "tf32"), (torch.bfloat16, False, "half")],
)
def test_ways_of_multiplying(dtype, tf32, kind):
    assert plans.way_for(dtype, 64, torch.device(DEVICE), tf32).arithmetic == kind


@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU there is nothing to choose")
def test_triton_imported_too_early_is_named():
    code = "import triton, torch; from cs336_systems.attention import attention; q = torch.ones(1, 4, 16)\n"
    code += "attention(q, q, q, implementation='flash_triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "RuntimeError: triton was imported before cs336_systems" in run.stderr


def test_a_second_launch_passes_the_constants_in_the_kernels_order(monkeypatch):
    """The compiled kernel takes by position what the first launch passes by name."""

    class Recorder(launch.Launch):
        def __call__(self, *tensors):
            names = self.kernel.arg_names
            assert names[-len(self.constants) :] == list(self.constants)
            assert len(names) == len(tensors) + len(self.numbers) + len(self.constants)
            seen.append(self.kernel)

    seen = []
    monkeypatch.setattr(plans, "Launch", Recorder)
    q, k, v = (x.detach() for x in random_inputs(1, n=48, n_keys=49, d=40))
    output, logsumexp = flash_forward(q, k, v, True)
    flash_backward(q, q, k, v, output, logsumexp, True)
    assert len(seen) == 3
    plans.forward_plan.cache_clear()
    plans.backward_plan.cache_clear()


def test_without_gpu_and_interpreter_it_says_where_it_can_run(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="are on cpu; allowed: a CUDA GPU, or any device in Triton's inter"):
        FlashAttentionTriton.apply(*(torch.zeros(1, 4, 8) for _ in range(3)))
