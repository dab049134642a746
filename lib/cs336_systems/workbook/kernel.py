"""papermill on a kernel that is certainly this Python, whatever kernels the user has installed."""

import logging
import sys
from pathlib import Path
from typing import Any

import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError


class ThisPython(AsyncKernelManager):
    """Starts the ipykernel of the running interpreter and looks up no kernel by name."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def run_notebook(source: Path, output: Path, parameters: dict[str, Any]) -> int:
    """Execute a notebook in its own folder; what came out is written cell by cell.

    Returns:
        0, or 1 after printing one line that says what went wrong and where.
    """
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            source, output, parameters, cwd=source.parent, progress_bar=False,
            kernel_name="python3", language="python", kernel_manager_class=ThisPython,
        )  # fmt: skip
    except PapermillExecutionError as error:
        what = " ".join(f"{error.ename}: {error.evalue}".split())
        print(f"cell [{error.exec_count}]: {what}", file=sys.stderr)
        return 1
    except (DeadKernelError, CellTimeoutError) as error:
        print(f"the kernel died, perhaps out of memory ({' '.join(str(error).split())})", file=sys.stderr)
        return 1
    return 0
