"""The words that parameters of notebooks take: a wrong one is refused before anything runs.

Written out, because every command reads them and what they name takes seconds to import. The tests hold them
against the library and the notebooks.
"""

from collections.abc import Sequence

from cs336_systems.configs import MODEL_SIZES
from cs336_systems.measure.schema import DTYPES, PASSES

# Words that mean the same in every notebook, by the name of one of them: a list may hold several.
EVERYWHERE: dict[str, Sequence] = {
    "dtype": DTYPES,
    "pass": PASSES,
    "attention": ("reference", "sdpa", "flash_pytorch", "flash_triton", "auto"),
    "edition": tuple(MODEL_SIZES),
    "device": ("auto", "cpu", "cuda"),
    "source": ("auto", "nsys", "torch"),
    "backend": ("auto", "gloo", "nccl"),
    "collective": ("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    "optimizer": ("SGD", "AdamW"),
    "tile_kernel": ("forward", "dq", "dkdv"),
    "strategy": ("none", "every N", "half blocks", "sqrt_n", "recursive", "from start"),
}

_ATTENTION = ("reference", "sdpa", "flash_pytorch", "flash_triton", "compiled", "flash_compiled")
_PEERS = ("flash_triton", "reference", "compiled", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex")
_WRAPPERS = ("single", "naive", "flat", "overlapped", "bucketed", "torch")
# Words of one notebook, by its slug.
IMPLEMENTATIONS: dict[str, Sequence[str]] = {
    "pytorch_attention": _ATTENTION,
    "torch_compile": ("eager", "compiled", "compiled_blocks"),
    "weighted_sum": ("eager", "compiled", "matmul", "triton", "triton_descriptor"),
    "flash_forward": _ATTENTION,
    "flash_backward": _ATTENTION,
    "flash_benchmarking": _PEERS,
    "flash_leaderboard": _PEERS,
    "naive_ddp": _WRAPPERS,
    "naive_ddp_benchmarking": _WRAPPERS,
    "minimal_ddp_flat_benchmarking": _WRAPPERS,
    "ddp_overlap_individual_parameters_benchmarking": _WRAPPERS,
    "ddp_bucketed_benchmarking": _WRAPPERS,
}
PARTS: dict[str, Sequence[str]] = {
    "torch_compile": ("attention", "model"),
    "flash_benchmarking": ("grid", "tiles"),
    "flash_leaderboard": ("protocol", "ladder", "models"),
}


def choices(slug: str, name: str) -> Sequence | None:
    """The words that a parameter, named in the singular, may have in the notebook of a problem.

    None where any word may do.
    """
    of_notebook = {"implementation": IMPLEMENTATIONS, "part": PARTS}.get(name, {})
    return EVERYWHERE.get(name) or of_notebook.get(slug)
