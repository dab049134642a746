"""The graded steps of the notebooks: of typical wrong answers the checker names the mistake.

A wrong answer is the committed solution with one place changed. Bad input, a function that returns nothing or
never ends say, is told in one sentence, and nothing leaves the checker's cell.
"""

import ast
import contextlib
import io
import linecache
import symtable
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import nbformat
import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

from labbook.book.notebooks import NOTEBOOKS
from labbook.book.tidy import CHECKER, has_solution

# The steps that this file has to cover; others have tests beside their checkers.
WITH_STEPS = ("11", "12", "13", "14", "15", "16", "21", "23", "24", "25", "31", "32", "35", "37", "61")
# Number of a notebook, what is written there, a piece of it, what stands there instead, and what is said.
WRONG = [
    ("11", "time_steps", "times[warmup_steps:]", "times", "uncounted"),
    ("11", "time_steps", "range(warmup_steps + steps)", "range(steps)", "uncounted"),
    ("11", "time_steps", "        wait()\n        times", "        times", "is the step over"),
    ("11", "time_steps", "1e3 * (", "(", "milliseconds"),
    ("11", "time_steps", "        start =", "        if not times:\n            start =", "its own start"),
    ("11", "time_steps", "1e3 * (", "1e6 * (", "milliseconds"),
    ("11", "time_steps", "        wait()\n        start", "        start", "before the clock starts"),
    ("12", "kernels_of", "launch_ns.between", "start_ns.between", "launched before"),
    ("12", "kernels_of", "opened.end_ns)]", "opened.end_ns) & (kernels.thread == opened.thread)]",
     "any thread"),
    ("13", "spacing", "exponent - 10", "exponent - 11", "2^(e - 10)"),
    ("13", "spacing", ".floor()", ".ceil()", "2^(e - 10)"),
    ("13", "replay", "dtype=total_dtype", "dtype=addend_dtype", "of its own dtype"),
    ("13", "replay", "total += torch", "total = total.double() + torch", "of its own dtype"),
    ("14", "layer_norm", "x = x.to(dtype)\n", "x = x.clone()\n", "torch.float64; wanted"),
    ("14", "layer_norm", ").mean(-1, keepdim=True)\n    return", ").sum(-1, keepdim=True)\n    return",
     "a mean"),
    ("14", "layer_norm", "(variance + eps).sqrt()", "(variance.sqrt() + eps)", "eps in it"),
    ("15", "saved_bytes", "(*module.parameters(), *module.buffers())", "module.buffers()", "no activation"),
    ("15", "saved_bytes", "(*module.parameters(), *module.buffers())", "module.parameters()", "rotary"),
    ("15", "saved_bytes", "sizes[tensor.untyped_storage().data_ptr()]", "sizes[len(sizes)]", "storage once"),
    ("16", "segments", "(0, len(blocks), k)", "(0, len(blocks) - k + 1, k)", "no block is lost"),
    ("16", "segments", "tuple(blocks[start : start + k])", "blocks[start]", "no block is lost"),
    ("16", "segments", "return tuple(", "return list(", "no block is lost"),
    ("16", "halves", "len(blocks) <= 1", "len(blocks) <= 2", "is a tuple, too"),
    ("16", "halves", "return tuple(blocks)", "return blocks[0]", "is a tuple, too"),
    ("16", "halves", "return halves(blocks[:half]),", "return tuple(blocks[:half]),", "blocks run again"),
    ("16", "run", "torch.utils.checkpoint.checkpoint(run, part, x, use_reentrant=False)", "run(part, x)",
     "is every inner tuple a segment"),
    ("16", "run", "else part(x)", "else x + part(x)", "what the last one made"),
    ("16", "run", "else part(x)", "else torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)",
     "no single block"),
    ("21", "my_softmax", "scores.amax(-1, keepdim=True)", "0", "maximum"),
    ("21", "my_softmax", "scores.amax(-1, keepdim=True)", "scores.max()", "own maximum"),
    ("21", "my_softmax", "exponentials.sum(-1, ", "exponentials.sum(0, ", "which dimension"),
    ("21", "my_attention", " / q.shape[-1] ** 0.5", "", "case 'full'"),
    ("21", "my_attention", ".tril()", ".tril(scores.shape[-1] - scores.shape[-2])",
     "causal, twice as many keys"),
    ("21", "my_attention", "~visible", "visible.triu()", "case 'causal'"),
    ("23", "row_sums_kernel", "total += tl", "total = tl", "tiles added up"),
    ("23", "row_sums_kernel", "& (columns < n_columns)", "& (columns >= 0)", "both edges"),
    ("23", "row_sums_kernel", "(rows[:, None] < n_rows) & ", "", "row_sums_kernel loads"),
    ("23", "row_sums_kernel", "w_ptr + columns, mask=columns < n_columns, other=0.0", "w_ptr + columns",
     "row_sums_kernel loads"),
    ("23", "row_sums_backward", "dy[:, None] * w, mask=inside", "dy[:, None] * w",
     "row_sums_backward stores"),
    ("23", "row_sums_backward", "dw, mask=columns < n_columns", "dw", "row_sums_backward stores"),
    ("23", "row_sums_backward", "tl.sum(dy[:, None] * x, 0)", "tl.sum(x, 0)", "dw of x"),
    ("23", "row_sums_backward", "dy[:, None] * w", "dy[:, None] + 0 * w", "dx of x"),
    ("24", "online_softmax", "correction * total", "total", "total, too"),
    ("24", "online_softmax", "correction[:, None] * acc", "acc", "shrink"),
    ("24", "online_softmax", "torch.maximum(m, s.amax(-1))", "torch.zeros_like(m)", "maximum"),
    ("24", "online_softmax", "s.amax(-1)", "s.max()", "own maximum"),
    ("24", "visit_keys", "correction * total", "total", "shrink"),
    ("24", "visit_keys", "tl.exp2", "tl.exp", "exp2"),
    ("24", "visit_keys", "s = tl.where(visible, s, -float(\"inf\"))", "pass", "is a hidden score -inf"),
    ("24", "visit_keys", "tl.where(m_new == -float(\"inf\"), 0.0, m_new)", "m_new", "first tile may"),
    ("24", "is_visible", ">= keys", "> keys", "sees itself"),
    ("24", "is_visible", "visible = keys < n_keys", "visible = keys >= 0", "beyond the last"),
    ("24", "forward_kernel", "/ total[:, None]", "", "agrees with attention"),
    ("24", "forward_kernel", "(tile + 1) * ROWS)", "tile * ROWS + 1)", "causal"),
    ("24", "forward_kernel", " * 0.6931471805599453", "", "natural logarithm"),
    ("24", "forward_kernel", "lse, mask=rows < n_queries)", "lse)", "forward_kernel stores"),
    ("24", "forward_kernel", "k_ptr + sequence * n_keys * D", "k_ptr", "first sequence is right"),
    ("25", "delta", ".sum(-1)", ".sum(-2)", "one number a row"),
    ("25", "delta", "* o.float()", "", "columns of a row"),
    ("25", "delta", "do.float() * o.float()", "do * o", "it is torch.bfloat16"),
    ("25", "backward_kernel", "dq, mask=inside)", "dq)", "backward_kernel adds"),
    ("25", "tile_gradients", "dp - delta[:, None]", "dp", "delta"),
    ("25", "tile_gradients", "s * scale - lse", "s - lse", "s scaled"),
    ("25", "backward_kernel", "dv += ", "dv = ", "dV"),
    ("25", "backward_kernel", "tl.atomic_add(", "tl.store(", "dQ"),
    ("25", "backward_kernel", "q, input_precision=\"ieee\") * scale", "q, input_precision=\"ieee\")", "dK"),
    ("31", "ring_all_reduce", "if step < n - 1", "if step < n", "which part is complete"),
    ("31", "ring_all_reduce", "2 * (n - 1)", "n - 1", "which part is complete"),
    ("31", "ring_all_reduce", "sent[rank] += part.size", "sent[rank] += tensors[rank].size", "elements"),
    ("32", "MyDDP", "parameter.grad /= dist.get_world_size()", "pass", "is the sum over the ranks"),
    ("32", "MyDDP", "dist.broadcast(tensor.data, src=0)", "pass", "Broadcast every parameter"),
    ("35", "ShortOverlap", ".pop().wait()", ".pop()", "Keep every handle"),
    ("35", "ShortOverlap", "parameter.grad, async_op=True", "parameter.grad", "async_op=True"),
    ("35", "OrderedOverlap", "while len(self.handles) < len(self.order) and", "if", "messages leave only in"),
    ("35", "ShortOverlap", "parameter.grad /= dist.get_world_size()", "pass", "is the sum over the ranks"),
    ("35", "OrderedOverlap", "= torch.zeros_like(parameter)", "= parameter.detach().clone()",
     "only rank 0 uses"),
    ("35", "OrderedOverlap", "in self.ready:", "in self.order:", "OrderedOverlap"),
    ("37", "fill", "reversed(range(len(sizes)))", "range(len(sizes))", "from the last"),
    ("37", "fill", "buckets[-1] and ", "", "nothing fits in"),
    ("37", "fill", "used = 0", "pass", "begin at 0"),
    ("37", "MyBuckets", "                ready.clear()\n", "", "a gradient that is not there"),
    ("37", "MyBuckets", "buffer.div_(dist.get_world_size())", "pass", "is the sum over the ranks"),
    ("37", "MyBuckets", "p.grad = view.copy_(p.grad)", "view.copy_(p.grad)", "still this rank's own"),
    ("37", "MyBuckets", "self.handles.append(dist.all_reduce(buffer, async_op=True))",
     "dist.all_reduce(buffer, async_op=True)", "Keep every handle"),
    ("41", "deal", "return owners", "owners.popitem()\n    return owners", "keys are the parameters"),
    ("41", "deal", "+= parameter.nbytes", "+= 1", "not by bytes"),
    ("61", "chunked_loss", '"sum") / len(hidden)', '"mean")', "the mean over all tokens"),
    ("61", "chunked_loss", "d_logits[torch.arange(len(d_logits)), targets[rows]] -= 1", "pass",
     "at the target"),
    ("61", "chunked_loss", "d_weight += ", "d_weight = ", "chunks added up"),
    ("61", "rms_norm_backward", " - n * (g * n).mean(-1, keepdim=True)", "", "second term"),
    ("61", "rms_norm_backward", "(g * n).mean(-1, keepdim=True)", "(g * n).mean()", "mean over a row"),
    ("61", "rms_norm_backward", "(dy * n).sum(0)", "(dy * n).mean(0)", "sum over the rows"),
    ("61", "rms_norm_backward", "(dy * n).sum(0)", "(dy * x).sum(0)", "times n"),
    ("61", "most_saved", "range(capacity, size - 1, -1)", "range(size, capacity + 1)", "downwards"),
    ("61", "most_saved", "max(best[room], best[room - size] + time)", "best[room - size] + time",
     "without it"),
]  # fmt: skip


class Written:
    """A step of a notebook: the cells that its checkers need, the solution among them."""

    def __init__(self, number: str, name: str) -> None:
        (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        place = next(i for i, cell in enumerate(cells) if has_solution(cell) and name in _makes(cell.source))
        following = [i for i in range(place + 1, len(cells)) if has_solution(cells[i])] + [len(cells)]
        checkers = [i for i in range(place, following[0]) if CHECKER in cells[i].metadata.get("tags", ())]
        wanted, needed = set(), []
        for i in range(checkers[-1], -1, -1):
            if i in checkers or _makes(cells[i].source) & wanted:
                wanted |= _reads(cells[i].source)
                needed.append(i)
        self.name, self.solution = name, cells[place].source
        self.before = [cells[i].source for i in needed[::-1] if i < place]
        self.after = [cells[i].source for i in needed[::-1] if i > place]

    def says(self, solution: str, wrap: Callable[[Any], Any] = lambda made: made) -> str:
        """What the checkers print of this solution, of which `wrap` may change what it has made."""
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()):
            for source in (*self.before, solution):
                _run(source, names)
        names[self.name] = wrap(names[self.name])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for source in self.after:
                _run(source, names)
        return printed.getvalue()


written = cache(Written)


def _run(source: str, names: dict[str, Any]) -> None:
    """As a notebook does: what is defined finds its own source, which Triton asks for."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), names)


@cache
def _makes(source: str) -> set[str]:
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


@cache
def _reads(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _graded(number: str) -> Iterator[str]:
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    for cell in nbformat.read(path, as_version=4).cells:
        if has_solution(cell):
            yield from _makes(cell.source)


@pytest.mark.parametrize("number", WITH_STEPS)
def test_every_step_has_two_wrong_answers(number):
    for name in _graded(number):
        assert sum(wrong[:2] == (number, name) for wrong in WRONG) >= 2, name


@pytest.mark.parametrize(("number", "name", "piece", "instead", "named"), WRONG)
def test_a_wrong_answer_is_named(number, name, piece, instead, named):
    step = written(number, name)
    assert piece in step.solution
    said = step.says(step.solution.replace(piece, instead))
    crosses = [line for line in said.splitlines() if line.startswith("✗")]
    assert named in " ".join(crosses), said
    assert "not right" in said


def test_the_best_ratio_first_is_named():
    def greedy(sizes, times, capacity):
        saved = 0.0
        for size, saves in sorted(zip(sizes, times, strict=True), key=lambda item: item[0] / item[1]):
            if size <= capacity:
                capacity, saved = capacity - size, saved + saves
        return saved

    step = written("61", "most_saved")
    assert "✗ not the best ratio first" in step.says(step.solution, lambda _: greedy)


FUNCTIONS = [
    ("11", "time_steps"), ("12", "kernels_of"), ("14", "layer_norm"), ("15", "saved_bytes"),
    ("13", "spacing"), ("13", "replay"), ("16", "segments"), ("16", "halves"), ("16", "run"),
    ("21", "my_softmax"), ("21", "my_attention"), ("25", "delta"), ("37", "fill"),
    ("61", "chunked_loss"), ("61", "rms_norm_backward"), ("61", "most_saved"),
]  # fmt: skip
OF_TENSORS = [
    ("13", "replay"),
    ("14", "layer_norm"),
    ("21", "my_softmax"),
    ("21", "my_attention"),
    ("25", "delta"),
]
OF_TENSORS += [("61", "chunked_loss"), ("61", "rms_norm_backward")]


def crosses(number, name, wrap):
    """What is told of this change to a solution; whatever it is, the step ends with its verdict."""
    step = written(number, name)
    said = step.says(step.solution, wrap).splitlines()
    assert said[-1].endswith(": not right"), said
    return [line for line in said if line.startswith("✗")]


@pytest.mark.parametrize(("number", "name"), FUNCTIONS)
def test_one_that_returns_nothing(number, name):
    (told,) = crosses(number, name, lambda right: lambda *args, **kwargs: None)
    assert "return" in told


def each(change):
    """Applies to a tensor that is returned, or to each tensor of several."""

    def wrap(right):
        def call(*args, **kwargs):
            found = right(*args, **kwargs)
            if isinstance(found, tuple):
                return tuple(change(torch.as_tensor(x)) for x in found)
            return change(found)

        return call

    return wrap


@pytest.mark.parametrize(("number", "name"), OF_TENSORS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x: x * torch.nan, ("NaN", "not finite", "rowsum")),
        (lambda x: x[None], ("shape", "(1, ", "(1,)")),
        (lambda x: x.detach().to("meta"), ("on meta",)),
        (lambda x: x.detach().tolist(), ("wanted: a tensor", "list")),
        (lambda x: x.half(), ("float16",)),
    ],
    ids=["NaN", "shape", "device", "no tensor", "dtype"],
)
def test_a_result_of_the_wrong_kind(number, name, change, named):
    told = crosses(number, name, each(change))
    assert len(told) == 1
    assert any(word in told[0] for word in named), told


@pytest.mark.parametrize(("number", "name"), OF_TENSORS[1:])
def test_one_that_overwrites_its_inputs(number, name):
    def wrap(right):
        def call(*args, **kwargs):
            found = right(*args, **kwargs)
            first = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            first.data.zero_()
            return found

        return call

    assert any("overwritten" in line for line in crosses(number, name, wrap))
