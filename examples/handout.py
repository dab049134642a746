"""The workbook without solutions, for a class: `make handout` writes handout/.

Its notebooks are learners' copies. In its library the functions that answer a step are left to write
(EMPTIED), but those that other steps start from, which stand in: right, slow, and without a tile (STAND_INS).
Tests, the bank of solutions among them, and history stay behind. A solution that is left is refused.
"""

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat

from labbook.book.tidy import write_copies

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = ("tests/", ".ci/", ".github/", "examples/", "TEACHING.md")
KEPT = {  # of an emptied module: what no step asks for, and others call
    "attention/flash_pytorch.py": ["FlashAttentionPyTorch"],
    "attention/simple_triton.py": ["load_tile", "store_tile"],
    "parallel/ddp.py": [
        "DataParallel",
        "as_message",
        "broadcast_from_rank_0",
        "in_backward",
        "ready_for_mean",
        "start_mean",
        "weak_hook",
    ],
    "parallel/overlapped.py": ["bucket_bytes"],
    "training/fused_block.py": ["Weights", "kept_bytes"],
    "training/leaderboard.py": ["Batch", "attention_of", "attending"],
    "training/linear_cross_entropy.py": ["plain_cross_entropy_"],
}
EMPTIED = (
    "attention/bf16x3.py",
    "attention/dq_accum.py",
    "attention/flash_triton.py",
    "attention/hopper_backward.py",
    "attention/hopper_common.py",
    "attention/hopper_forward.py",
    "attention/triton_backward.py",
    "attention/triton_common.py",
    "attention/triton_forward.py",
    "kernels/cross_entropy.py",
    "kernels/rms_norm.py",
    "kernels/swiglu.py",
    "kernels/weighted_sum.py",
    "parallel/fsdp.py",
    "parallel/parameter_group.py",
    "parallel/sharded_optimizer.py",
    "parallel/tensor_parallel.py",
) + tuple(KEPT)
# The cell of 25 that shows a step's answer once more.
SHOWN_AGAIN = "@triton.jit\ndef sum_and_add("
STAND_INS = {
    "attention/flash_pytorch.py": '''

def _whole(q, k, v, is_causal):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:]).bool().tril(), -math.inf)
    return scores.softmax(-1) @ v.float(), scores.logsumexp(-1)


def flash_forward(q, k, v, is_causal=False):
    """O in q's dtype and L = logsumexp(scores) in float32, from the whole matrix of scores."""
    o, logsumexp = _whole(q, k, v, is_causal)
    return o.to(q.dtype), logsumexp


def flash_backward(do, q, k, v, o, logsumexp, is_causal=False):
    """Gradients of q, k, v, by autograd; with what it adds to them that O was rounded."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        exact, logsumexp = _whole(*inputs, is_causal)
        rounding = torch.linalg.vecdot(do.float(), o.float() - exact.detach())
        total = (exact * do.float()).sum() - (rounding * logsumexp).sum()
        return torch.autograd.grad(total, inputs)
''',
    "attention/simple_triton.py": '''

@triton.jit
def is_visible(rows, keys, n_keys, CAUSAL: tl.constexpr):
    """Which keys exist, and are seen from which rows."""
    seen_from = tl.where(CAUSAL, keys, 0)
    return (keys < n_keys) & (rows[:, None] >= seen_from)


def launch_forward(q, k, v, is_causal=False, *tile, **options):
    """O and L, without a kernel."""
    from cs336_systems.attention.flash_pytorch import flash_forward

    return flash_forward(q, k, v, is_causal)


def delta(do, o):
    """What backward needs of each row of O."""
    return torch.linalg.vecdot(do.float(), o.float())
''',
}
BLOCK = r"### BEGIN SOLUTION\n(.*?)### END SOLUTION"
STUB = 'raise NotImplementedError("left out of this hand-out")'


def emptied(source: str, kept: list[str]) -> str:
    """A module with signatures and docstrings of what is in it; what is kept has its body."""
    lines = source.splitlines()
    # The last comes first: the lines before it keep their numbers.
    for function in reversed(functions_of(source, kept)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        first = body[0].lineno if body else function.end_lineno + 1
        indent = " " * function.body[0].col_offset
        lines[first - 1 : function.end_lineno] = [indent + STUB]
    return "\n".join(lines) + "\n"


def functions_of(source: str, kept: list[str]) -> list[ast.FunctionDef]:
    """Functions of a module and methods of its classes, but for what is kept."""
    nodes = []
    for node in ast.parse(source).body:
        if getattr(node, "name", "") not in kept:
            nodes += node.body if isinstance(node, ast.ClassDef) else [node]
    return [node for node in nodes if isinstance(node, ast.FunctionDef)]


def of_class(readme: str) -> str:
    """README without the commands and the pages that stay behind."""
    readme = re.sub(r"(?m)^(make test|\| a hand-out|tests/) .*\n", "", readme)
    readme = readme.replace(
        "Two commands do all the set-up by themselves", "This does all the set-up"
    )
    return unlinked(readme.replace(" A class: [TEACHING](TEACHING.md).", ""))


def unlinked(text: str) -> str:
    """Text whose links to what stays behind are plain words."""
    return re.sub(rf"\[([^\]]+)\]\(({'|'.join(LEFT_BEHIND)})[^)]*\)", r"\1", text)


def sources(path: Path) -> list[str]:
    """A notebook's cells."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def bare(text: str) -> str:
    """Its lines without indentation and comments; those with nothing on them go."""
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def solutions() -> list[str]:
    """Those that the notebooks show."""
    texts = ["\n".join(sources(path)) for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")]
    return [bare(block) for text in texts for block in re.findall(BLOCK, text, re.DOTALL)]


def other_solutions() -> list[str]:
    """Right ones that the tests try."""
    texts = []
    for path in (ROOT / "tests" / "solutions").glob("[0-9]*.py"):
        for of_step in runpy.run_path(str(path))["RIGHT"].values():
            texts += of_step
    return [bare(text) for text in texts]


def pieces(solution: str) -> list[str]:
    """Every four lines of it that follow each other."""
    lines = solution.splitlines()
    return ["\n".join(lines[i : i + 4]) for i in range(len(lines) - 3)]


def left_in(target: Path) -> list[str]:
    """Solutions that a folder has all the same: a whole one anywhere, or four lines of one in a module."""
    modules = [path.read_text(encoding="utf-8") for path in target.rglob("*.py")]
    cells = [text for path in target.rglob("*.ipynb") for text in sources(path)]
    library = bare("\n".join(modules))
    everything = bare("\n".join(modules + cells))
    left = [text for text in other_solutions() if text in everything]
    for solution in solutions():
        is_long_enough = solution.count("\n") > 1  # one or two lines stand anywhere
        is_whole = is_long_enough and solution in everything
        if is_whole or any(piece in library for piece in pieces(solution)):
            left.append(solution)
    return left


def copy_files(target: Path) -> None:
    """What git knows, without notebooks and what stays behind."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in tracked.stdout.splitlines():
        is_handed = not name.startswith(LEFT_BEHIND) and not name.endswith(".ipynb")
        if is_handed and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def copy_notebooks(folder: Path) -> None:
    """Learners' copies of all."""
    list(write_copies(sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), folder))
    for path in folder.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.source.startswith(SHOWN_AGAIN):
                cell.source = emptied(cell.source, [])
        nbformat.write(notebook, path)


def rewrite(path: Path, form: Callable[[str], str]) -> None:
    """Give a file another text, made from what it has."""
    path.write_text(form(path.read_text(encoding="utf-8")), encoding="utf-8")


def write(target: Path, *more: str) -> None:
    """Write the hand-out to a folder that is not there yet; more modules may be emptied, too."""
    if target.exists():
        raise SystemExit(f"{target} is there already: delete it for a new one")
    copy_files(target)
    rewrite(target / "README.md", of_class)
    rewrite(target / "CONTRIBUTING.md", unlinked)
    copy_notebooks(target / "notebooks")
    for name in EMPTIED + more:
        path = target / "lib/cs336_systems" / name
        source = emptied(path.read_text(encoding="utf-8"), KEPT.get(name, []))
        path.write_text(source + STAND_INS.get(name, ""), encoding="utf-8")
    if left := left_in(target):
        raise SystemExit(f"{target} still has a solution: {left[0]}")


if __name__ == "__main__":
    folder, *others = sys.argv[1:] or ["handout"]
    write(ROOT / folder, *others)
    print(f"{folder}: notebooks, library and rows, without solutions and tests")
