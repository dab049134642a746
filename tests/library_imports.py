"""What import statements name in the two packages."""

import ast

PACKAGES = ("cs336_systems", "labbook")


def imported(node: ast.AST, packages: tuple[str, ...] = ("cs336_systems",)) -> list[str]:
    """Of an import of the library what it names: "cs336_systems.parallel.launch"."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in packages]
    return []
