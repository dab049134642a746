"""What a run of data-parallel wrappers may be, and the wrapper by its name."""

from collections.abc import Iterable, Sequence

from torch import nn

from cs336_systems.arguments import check_choice
from cs336_systems.dtypes import DTYPES
from cs336_systems.parallel.strategies import WITH_BUCKETS, WRAPPERS


def bucket_variants(
    implementations: Iterable[str], bucket_sizes_mb: Sequence[float]
) -> list[tuple[str, float | None]]:
    """Each wrapper with each bucket size, and once with None if it has no buckets."""
    return [
        (name, size)
        for name in implementations
        for size in (bucket_sizes_mb if name in WITH_BUCKETS else [None])
    ]


def check_run(
    world_size: int,
    batch_sizes: Iterable[int],
    dtypes: Iterable[str],
    implementations: Iterable[str],
    known: Iterable[str],
) -> None:
    """Refuse (ValueError) unknown names, and a batch that the ranks cannot share equally."""
    for name in implementations:
        check_choice("implementation", name, known)
    for dtype in dtypes:
        check_choice("dtype", dtype, DTYPES)
    for size in batch_sizes:
        if size % world_size:
            sentence = f"batch_size {size} cannot be shared by {world_size} ranks equally"
            raise ValueError(f"{sentence}; allowed: its multiples")


def wrap(module: nn.Module, implementation: str, bucket_size_mb: float | None) -> nn.Module:
    """The module in the wrapper of this name."""
    options = {} if bucket_size_mb is None else {"bucket_size_mb": bucket_size_mb}
    return WRAPPERS[implementation](module, **options)
