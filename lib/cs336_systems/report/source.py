"""Library code shown in a notebook: the lines that run, not a copy of them."""

import ast
import inspect
import textwrap
from collections.abc import Callable


def show_source(*objects: Callable | type) -> None:
    """Display the source of functions or classes as Markdown, without docstrings: the notebook explains."""
    from IPython.display import Markdown, display

    code = "\n\n".join(without_docstrings(inspect.getsource(each)) for each in objects)
    display(Markdown(f"```python\n{code}\n```"))


def without_docstrings(source: str) -> str:
    """Python source with the docstrings of its functions and classes taken out, comments and layout kept."""
    source = textwrap.dedent(source)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    kept = [line for line in lines if line is not None]
    return "\n".join(kept).rstrip()
