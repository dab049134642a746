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
    *KEPT,
)
# The cell of 25 that has a step's answer in it.
SAID_AGAIN = "@triton.jit\ndef sum_and_add("
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
_STUB = 'raise NotImplementedError("left out of this hand-out")'


def emptied(source: str, kept: list[str]) -> str:
    """A module with signatures and docstrings of what is in it; what is kept has its body."""
    lines = source.splitlines()
    functions = []
    for node in ast.parse(source).body:
        if getattr(node, "name", "") not in kept:
            functions += node.body if isinstance(node, ast.ClassDef) else [node]
    for node in reversed(functions):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = body[0].lineno if body else node.end_lineno + 1
            indent = " " * node.body[0].col_offset
            lines[first - 1 : node.end_lineno] = [indent + _STUB]
    return "\n".join(lines) + "\n"


def lines(text: str) -> list[str]:
    """Those with something on them, without indentation and comments."""
    bare = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in bare if line]


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


def left_in(target: Path) -> list[str]:
    """Solutions that a folder has all the same: a whole one anywhere, or four lines of one in a module."""
    modules = [path.read_text(encoding="utf-8") for path in target.rglob("*.py")]
    cells = [text for path in target.rglob("*.ipynb") for text in sources(path)]
    library, handed = ("\n".join(lines("\n".join(texts))) for texts in (modules, modules + cells))
    found = []
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        for block in re.findall(BLOCK, "\n".join(sources(path)), re.DOTALL):
            solution = lines(block)
            parts = ["\n".join(solution[i : i + 4]) for i in range(len(solution) - 3)]
            whole = "\n".join(solution)
            if any(part in library for part in parts) or (len(solution) > 2 and whole in handed):
                found.append(whole)
    for path in (ROOT / "tests" / "solutions").glob("[0-9]*.py"):
        for several in runpy.run_path(str(path))["RIGHT"].values():
            found += [right for right in several if "\n".join(lines(right)) in handed]
    return found


def sources(path: Path) -> list[str]:
    """A notebook's cells."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def write(target: Path, *more: str) -> None:
    """Write the hand-out to a folder that is not there yet; more modules may be emptied, too."""
    if target.exists():
        raise SystemExit(f"{target} is there already: delete it for a new one")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in tracked.stdout.splitlines():
        if not name.startswith(LEFT_BEHIND) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if not name.endswith(".ipynb"):
                shutil.copy(ROOT / name, target / name)
    for name, form in {"README.md": of_class, "CONTRIBUTING.md": unlinked}.items():
        text = (target / name).read_text(encoding="utf-8")
        (target / name).write_text(form(text), encoding="utf-8")
    list(write_copies(sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), target / "notebooks"))
    for path in (target / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.source.startswith(SAID_AGAIN):
                cell.source = emptied(cell.source, [])
        nbformat.write(notebook, path)
    for name in EMPTIED + more:
        path = target / "lib/cs336_systems" / name
        source = emptied(path.read_text(encoding="utf-8"), KEPT.get(name, []))
        path.write_text(source + STAND_INS.get(name, ""), encoding="utf-8")
    if found := left_in(target):
        raise SystemExit(f"{target} still has a solution: {found[0]}")


if __name__ == "__main__":
    folder, *others = sys.argv[1:] or ["handout"]
    write(ROOT / folder, *others)
    print(f"{folder}: notebooks, library and rows, without solutions and tests")
