"""IPython extension of the kernels of a batch: one ends when it has tidied up.

To take torch down, module by module, lasts seconds more.
"""

import atexit
import os
from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython before the first cell: what is registered first is called last."""
    atexit.register(os._exit, 0)
