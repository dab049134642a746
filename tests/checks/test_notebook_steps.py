"""The graded steps of the notebooks: of typical wrong answers the checker names the mistake.

A wrong answer is the committed solution with one place changed. Bad input, a function that returns nothing or
never ends say, is told in one sentence, and nothing leaves the checker's cell.
"""

import runpy
from pathlib import Path

import nbformat
import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

from solutions import makes, written
from torch.utils._pytree import tree_leaves

from labbook.book.tidy import has_solution
from labbook.project import project

# By notebook, of those that tests/solutions has not: what is written there, a piece of it, what stands there
# instead, and what is said.
WRONG = {
    "11": [
        ("forward_flops", "6 * tokens", "4 * tokens", "SwiGLU has three matrices"),
        ("forward_flops", " * context_length * d\n", " * d\n", "the square of T"),
        ("run_pass", "    net.zero_grad()\n", "", "pile up"),
        ("run_pass", "with torch.no_grad():", "if True:", "under torch.no_grad"),
        ("run_pass", "    return loss\n", "    return loss.item()\n", "`.item()` waits"),
        ("run_pass", '"train_step"', '"forward_backward"', "in train_step alone"),
        ("launch_ms", "(1 - places / kernels) * gpu_ms", "gpu_ms", "all but 1,024"),
        ("time_steps", "times[warmup_steps:]", "times", "uncounted"),
        (
            "time_steps",
            "        start = time.perf_counter()\n        step()\n",
            "        step()\n        start = time.perf_counter()\n",
            "is the step over",
        ),
    ],
    "12": [
        ("passes_over_scores", '"sum": 1', '"sum": 2', "each of them once"),
        ("attention_in_ranges", "    with nvtx", "    v = v / 1\n    with nvtx", "div in no range"),
        ("nsys_command", "cuda,nvtx", "cuda", "without, no ranges"),
        ("nsys_command", '"--capture-range=cudaProfilerApi", ', "", "warm-up is in it"),
        ("kernels_of", "launch_ns.between", "start_ns.between", "launched before"),
    ],
    "13": [
        ("spacing", "exponent - 10", "exponent - 11", "2^(e - 10)"),
        ("replay", "dtype=total_dtype", "dtype=addend_dtype", "of its own dtype"),
    ],
    "14": [
        ("mixed_step", "    loss.backward()", "        loss.backward()", "end the `with` before it"),
        (
            "running_mean",
            "+= x[..., place : place + 1]\n    return total / x.shape[-1]",
            "+= x[..., place : place + 1] / x.shape[-1]\n    return total",
            "divided first",
        ),
        ("layer_norm", "x = x.to(dtype)\n", "x = x.clone()\n", "torch.float64; wanted"),
    ],
    "15": [
        ("kept_by_block", "2 * B * H * T**2", "B * H * T**2", "exponentials, weights"),
        ("peak_of_step", "return max(", "return min(", "which of the two is larger"),
        ("snapshot_of", 'stacks="python"', "context=None", "who made an allocation"),
        ("peak_of_trace", '"free_requested"', '"free_completed": -1, "free_requested"', "counts once"),
        ("saved_bytes", "(*module.parameters(), *module.buffers())", "module.buffers()", "no activation"),
    ],
    "16": [
        ("segments", "(0, len(blocks), k)", "(0, len(blocks) - k + 1, k)", "no block is lost"),
        ("halves", "len(blocks) <= 1", "len(blocks) <= 2", "alone in a tuple"),
        ("peak_of", "in_front += b if segment else i + b", "in_front += i + b", "holds its input"),
        ("run", "x = part(x)", "x = x + part(x)", "what the last one made"),
    ],
    "21": [
        ("my_softmax", "scores.detach().amax(-1, keepdim=True)", "0", "maximum"),
        ("my_attention", " / q.shape[-1] ** 0.5", "", "the root of d"),
        ("my_attention", "(~visible, -torch.inf)", "(~visible, 0.0)", "before the softmax"),
    ],
    "22": [
        ("my_fused_bytes", "(1 + 2 + 1)", "(1 + 3 + 1)", "goes 5 times"),
        ("my_compile_seconds", "sorted(times[1:])[steady_calls // 2]", "sum(times[1:]) / 5", "0.40 s"),
    ],
    "23": [
        ("row_sums_kernel", "(rows[:, None] < n_rows) & ", "", "row_sums_kernel loads"),
        ("row_sums_backward", "dw, mask=columns < n_columns", "dw", "row_sums_backward stores"),
    ],
    "24": [
        ("next_state", "correction * total", "total", "total, too"),
        ("attend_tile", "first + n_queries", "2**30", "tile's last row"),
        ("tile_product", "(columns[:, None] < n) & ", "", "product_kernel loads"),
        ("visit_keys", "s = tl.where(visible, s, -float(\"inf\"))", "pass", "are they -inf"),
        ("is_visible", ">= keys", "> keys", "sees itself"),
        ("attend", "tl.max(rows, 0) + 1", "n_keys", "tile's last row"),
        ("attend", "0.6931471805599453", "1.0", "logsumexp"),
    ],
    "25": [
        ("delta", ".sum(-1)", ".sum(-2)", "one number a row"),
        ("attention_backward", "q32 @ k32.mT * scale", "torch.bmm(q32, k32.mT) * scale", "3D tensor"),
        ("tile_gradients", "dp - delta[:, None]", "dp", "delta"),
        ("sum_over_keys", "ds.to(k.dtype)", "ds", "must be same dtype"),
        ("sum_over_queries", "tl.min(keys, 0)", "0", "see none of its keys"),
    ],
    "26": [
        ("cold_times", "            x.grad = None", "            pass", "in every repetition"),
        ("host_bound", "[::-1].cummax()[::-1]", "", "what is shorter"),
        ("rows_and_registers", 'min(queries, keys) if kernel == "dkdv" else queries', "queries", "or a key"),
    ],
    "27": [
        ("visit_keys", "masked = tile * ROWS // KEYS * KEYS", "masked = 0", "where does `masked` end"),
        ("faults_found", '"E": "mixed batches"', '"E": "stale mask"', "three sequences"),
    ],
    "42": [
        ("held", "2 * parameter_bytes", "parameter_bytes", "AdamW has two moments"),
        ("held", "if name in sharded", "if len(sharded) == 3 or name in sharded[:1]", "each part that is"),
        ("sent", "(ranks - 1) / ranks", "1", "N - 1 of N links"),
        ("sent", "in collectives", "in set(collectives)", "the second gather, too"),
        ("gradient_peak", "max(most, ", "(", "the largest moment"),
    ],
    "43": [
        ("rows_of", "return torch.cat([mine, padding])", "return mine", "padded, and in the weight"),
        ("ShardedModule", "rows[: len(weight.whole)]", "rows[::2]", "put the shards together in the order"),
        ("ForwardFSDP", "wanted[0].work.wait()", "pass", "may be on its way"),
        ("ShortFSDP", "len(self.reductions) > left:", "self.reductions and left == 0:", "at once"),
        ("MyFSDP", "place : place + 3", "place : place + 4", "allowed: two layers ahead"),
        (
            "MyFSDP",
            "        self.collect(self.order[place : place + 3])\n",
            "        self.collect(self.order[place : place + 3])\n"
            "        [ahead.work.wait() for ahead in self.order[place : place + 3]]\n",
            "wait for its own gather alone",
        ),
    ],
    "44": [
        ("hides", "2 * parameters * tokens", "parameters * tokens", "a multiplication and an addition"),
        ("hides", "received / forward_s", "flops_per_s * element_bytes / tokens / 4", "of four ranks three"),
        ("could_begin", ", *launches[launches >= mark].head(1)", "", "the next one's launch"),
        ("computing_share", "max(0.0, min(b, end) - max(a, start))", "b - a", "below"),
        ("least_bandwidth", "for j in range(i + 1)]", "for j in range(i, i + 1)]", "a queue"),
    ],
    "55": [
        ("slice_of", 'dim=1 if name == "w2" else 0', "dim=0", "w2 keeps columns"),
        ("Sum", "return grad, None", "return 2 * grad, None", "Sum, backward: this rank's own"),
        ("SumGradient", "return x.view_as(x)", "return 2 * x", "SumGradient, forward: this rank's own"),
        ("TensorParallelSwiGLU", "x = SumGradient.apply(x, self.group)", "pass", "this rank's slice"),
        ("sequence_bytes", '"backward": 3', '"backward": 2', "half as much again"),
        ("GatherLinear", "scattered(grad @ weight, ctx.group)", "2 * (grad @ weight)[:len(x)]", "not sliced"),
        (
            "GatherLinear",
            "return gathered(x, group) @",
            "ctx.whole = gathered(x, group)\n        return ctx.whole @",
            "is not kept",
        ),
    ],
    "56": [
        ("largest_in_sequence", "left.subs(X, x)", "left", "is Y what X leaves"),
        ("best_split", "(N / X - 1) / b", "(N / X - 1) / a", "is X sqrt(a)"),
        ("gather_s", "per_host / tensor", "per_host", "whose cards carry a slice"),
    ],
    "61": [
        ("flops_per_byte", "2 * d * width / (2 * width)", "2 * d", "2 d n FLOPs over"),
        ("feed_forward_backward", " * (1 + a * (1 - s))", "", "the derivative of silu?"),
        ("feed_forward_backward", "dy.T @ (a * s * b)", "dy.T @ (a * b)", "c is silu(a) b"),
        ("feed_forward_backward", "s = torch.sigmoid(a)", "s = torch.sigmoid(n @ w1.T)", "7 are; a and b"),
        ("chunked_loss", '"sum") / count', '"mean")', "the mean over all tokens"),
        (
            "chunked_loss",
            "        loss +=",
            "        kept = kept + [logits] if first else [logits]\n        loss +=",
            "earlier one",
        ),
        ("rms_norm_backward", " - n * mean", "", "second term"),
    ],
}  # fmt: skip
BANK = Path(__file__).parents[1] / "solutions"
WRONG_STEPS = [(number,) + wrong for number, rows in WRONG.items() for wrong in rows]


def test_every_step_has_a_wrong_answer():
    for path in project().notebooks.glob("*.ipynb"):
        number = path.name[:2]
        planted = {name for name, *_ in WRONG.get(number, ())}
        if (BANK / f"{number}.py").exists():
            planted |= runpy.run_path(str(BANK / f"{number}.py"))["WRONG"].keys()
        for cell in nbformat.read(path, as_version=4).cells:
            if has_solution(cell):
                assert planted >= makes(cell.source), path


@pytest.mark.parametrize(("number", "name", "piece", "instead", "message"), WRONG_STEPS)
def test_a_wrong_answer_is_named(number, name, piece, instead, message):
    step = written(number, name)
    assert piece in step.solution
    printed = step.says(step.solution.replace(piece, instead))
    crosses = [line for line in printed.splitlines() if line.startswith("✗")]
    assert message in " ".join(crosses), printed
    assert "not right" in printed


FUNCTIONS = [("11", "time_steps"), ("12", "kernels_of"), ("13", "replay"), ("15", "saved_bytes")]
FUNCTIONS += [("16", "run"), ("37", "fill"), ("61", "feed_forward_backward")]
OF_TENSORS = [("14", "layer_norm"), ("21", "my_softmax"), ("21", "my_attention"), ("25", "delta")]
OF_TENSORS += [("61", "chunked_loss"), ("61", "rms_norm_backward")]


def crosses(number, name, wrap):
    """What is told of this change to a solution; whatever it is, the step ends with its verdict."""
    step = written(number, name)
    lines = step.says(step.solution, wrap).splitlines()
    assert lines[-1].endswith(": not right"), lines
    return [line for line in lines if line.startswith("✗")]


@pytest.mark.parametrize(("number", "name"), FUNCTIONS + OF_TENSORS)
def test_one_that_returns_nothing(number, name):
    (mistake,) = crosses(number, name, lambda right: lambda *args, **kwargs: None)
    assert "return" in mistake or "NoneType" in mistake


@pytest.mark.parametrize(("number", "name"), OF_TENSORS)
def test_one_that_overwrites_its_inputs(number, name):
    def wrap(right):
        def call(*args, **kwargs):
            result = right(*args, **kwargs)
            overwritten = next(
                x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
            )
            overwritten.data.zero_()
            return result

        return call

    assert any("overwritten" in line for line in crosses(number, name, wrap))
