"""Operations as eager PyTorch runs them: their bytes, their FLOPs, their least time, what they save."""

import pytest
import torch
from torch import nn

from cs336_systems.attention import ATTENTION
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from labbook.memory import (
    operations_of,
    saved_bytes,
    saved_for_backward,
    storage_bytes,
    sum_of_rooflines_ms,
)
from labbook.memory.operations import Operation

FLOAT = 4
BATCH = 2
CONTEXT = 16
CONFIG = model_size("tiny")


def empty(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def looked_up(x):
    """Looking up rows reads only those."""
    return x[empty(5, dtype=torch.long)]


def added_at_once(x):
    return torch._foreach_add_([x], [empty(30, 20)])


def bytes_moved(function):
    return sum(one.bytes_moved for one in operations_of(function))


def flops(function):
    return sum(one.flops for one in operations_of(function))


@pytest.mark.parametrize(
    ("function", "elements"),
    [
        (lambda x: x * empty(30, 1).expand(30, 20), 600 + 30 + 600),  # read at its own size
        (lambda x: x * x, 2 * 600),  # a tensor given twice is read once
        (lambda x: x[:, :10] + x[:, 10:], 600 + 300),  # halves of one tensor are both read
        (lambda x: x.view(600).unsqueeze(0).expand(2, 600), 0),
        (lambda x: x.mul_(2), 2 * 600),  # in place: reads what it changes, and not what it replaces
        (lambda x: torch._foreach_zero_([x]), 600),
        (torch.zeros_like, 600),
        (lambda x: x.copy_(empty(30, 20)), 2 * 600),
        (looked_up, 2 * 5 * 20),
        (lambda x: torch.mm(x, x.T, out=empty(30, 30)), 600 + 900),
        (lambda x: x[:, :10].mul_(2), 2 * 300),
        (added_at_once, 3 * 600),
    ],
)
def test_bytes_that_an_operation_moves(function, elements):
    x = empty(30, 20)
    assert bytes_moved(lambda: function(x)) == FLOAT * elements


def test_compiled_code_runs_and_stays_compiled():
    runs = []

    def backend(graph, _):
        return lambda *inputs: runs.append(1) or graph(*inputs)

    compiled = torch.compile(lambda x: x @ x, backend=backend)
    x = torch.randn(8, 8)
    compiled(x)
    assert [one.name for one in operations_of(lambda: compiled(x))] == ["mm"]
    compiled(x)
    assert len(runs) == 3


def test_a_fused_optimizer_reads_four_and_writes_three():
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    step = torch.optim.AdamW([parameter], fused=True).step
    step()
    assert bytes_moved(step) == pytest.approx(7 * FLOAT * 1000, rel=0.01)


@pytest.mark.parametrize("name", ["sdpa", "flash_triton"])
def test_fused_attention_and_products_with_vectors_have_flops(name):
    q, k, v = torch.randn(3, 1, 2, 32, 16, requires_grad=True).unbind()
    attend = ATTENTION[name].function
    product = 2 * 32 * 32 * 16
    assert flops(lambda: attend(q, k, v, False)) == 4 * product
    assert flops(lambda: attend(q, k, v, False).sum().backward()) == 14 * product
    matrix = q[0, 0]
    vector = v[0, 0, 0]
    assert flops(lambda: matrix @ vector) == 2 * 32 * 16
    assert flops(lambda: vector.vdot(vector)) == 2 * 16
    assert flops(lambda: torch.empty(32, 32).addmm_(matrix, matrix.T)) == product


def test_each_operation_waits_for_its_own_bottleneck():
    multiply = Operation("mm", 8 * 10**9, 1)
    add = Operation("add", 0, 3 * 10**6)
    assert sum_of_rooflines_ms([multiply, add], 2, 1) == pytest.approx(4 + 3)


# Bytes saved for backward, tensor by tensor.


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, CONTEXT)


@pytest.fixture
def x():
    return torch.randn(BATCH, CONTEXT, CONFIG.d_model, requires_grad=True)


def test_shared_storages_count_once_and_parameters_never():
    twice = nn.Linear(8, 8, bias=False, device="meta")
    w = twice.weight
    twice.forward = lambda x: x.exp() + (x @ w) * (x.view(2, 4, 8) @ w).view(8, 8)
    x = empty(8, 8, requires_grad=True)
    saved = saved_for_backward(twice, x)
    # x is saved by both products; exp and the product of products save their results and operands.
    assert saved.size_bytes.tolist() == [256] * 4
    assert set(saved.operation) == {"exp", "matmul", "mul"}
    assert storage_bytes([x, w, x]) == 512


def test_a_view_counts_as_the_storage_it_keeps_alive():
    x = torch.randn(100, requires_grad=True)
    sliced = nn.Module()
    sliced.forward = lambda x: x[:2].sin()
    assert saved_for_backward(sliced, x).size_bytes.tolist() == [400]


def test_what_a_block_saves(model, x):
    saved = saved_for_backward(model.layers[0], x)
    scores = BATCH * CONFIG.num_heads * CONTEXT**2 * 4
    ours = saved.code.str.startswith(("attention/plain", "functional"))
    assert saved[ours & (saved.module == "attn")].size_bytes.max() == scores
    assert set(saved.module) >= {"ln1", "attn", "attn.q_proj", "ffn", "ffn.w2"}
    assert not saved.module.str.startswith("layers").any(), "modules are named within the block"


class _OnItsContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.exponential = x.exp()
        return x.exp()


def test_bytes_of_a_function(x):
    """What operations save counts once, so does an attribute of a ctx, and all are alive until backward."""
    saved, in_use = saved_bytes(lambda: (x.exp() * _OnItsContext.apply(x)).sum(), [x])
    assert saved == 3 * x.nbytes
    assert in_use == 4 * x.nbytes + 4
