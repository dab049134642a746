"""What import statements name in the two packages."""

import ast

PACKAGES = ("cs336_systems", "labbook")


def imported(node: ast.AST, packages: tuple[str, ...] = ("cs336_systems",)) -> list[str]:
    """Of an import of the library what it names: "cs336_systems.parallel.launch"."""
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        return []
    return [name for name in names if name.partition(".")[0] in packages]
