"""What import statements name in the library."""

import ast


def imported(node: ast.AST) -> list[str]:
    """Of an import of the library what it names: "cs336_systems.bench.sweep_attention"."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cs336_systems":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("cs336_systems.")]
    return []
