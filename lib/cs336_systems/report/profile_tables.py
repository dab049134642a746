"""What the rows of profiled steps say: kernels by class, attention's parts."""

from typing import Any

import pandas as pd

from cs336_systems import accounting
from cs336_systems.configs import model_size
from labbook.profiles.table import stages

_RUN = ["profiler", "implementation", "attention", "edition", "model_size", "batch_size", "context_length"]
_RUN += ["dtype"]
_SCOPE = [*_RUN, "scope"]
# What the time of a profiled model is a share of.
SCOPES = ("inference", "forward + backward", "training step")


def of_main_profiler(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the profiler that saw most runs: one picture does not mix two of them."""
    runs = rows.drop_duplicates([*_RUN, "pass"]).profiler.value_counts()
    return rows[rows.profiler == runs.idxmax()] if len(runs) else rows


def by_scope(kernels: pd.DataFrame) -> pd.DataFrame:
    """Kernel rows under a column `scope`, one of SCOPES; inference is a forward that keeps nothing.

    Forward and backward are those ranges of a training step, or, where none fits, of that pass by itself.
    """
    kernels = kernels[kernels.status == "ok"]
    stage, pass_ = stages(kernels), kernels["pass"]
    both = kernels[pass_.isin(["train_step", "forward_backward"]) & stage.isin(["forward", "backward"])]
    longest = both.groupby(_RUN)["pass"].transform("max")  # "train_step" comes after "forward_backward"
    parts = (kernels[pass_ == "forward"], both[both["pass"] == longest], kernels[pass_ == "train_step"])
    return pd.concat([rows.assign(scope=scope) for scope, rows in zip(SCOPES, parts, strict=True)])


def shares(scoped: pd.DataFrame) -> pd.DataFrame:
    """Calls, total_ms and share of each class in each run and scope."""
    return _sums(scoped, ["class"])


def leaders(scoped: pd.DataFrame) -> pd.DataFrame:
    """The kernel with most time in each run and scope: kernel, class, calls, total_ms, share of the whole."""
    sums = _sums(scoped, ["kernel", "class"])
    return sums[sums.kernel != "rest"].groupby(_SCOPE).head(1).reset_index(drop=True)  # that is many kernels


def _sums(scoped: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    sums = scoped.groupby([*_SCOPE, *columns])[["calls", "total_ms"]].sum()
    sums["share"] = sums.total_ms / sums.groupby(_SCOPE).total_ms.transform("sum")
    largest_first = [True] * len(_SCOPE) + [False]
    return sums.reset_index().sort_values([*_SCOPE, "total_ms"], ascending=largest_first, ignore_index=True)


def attention_parts(kernels: pd.DataFrame) -> pd.DataFrame:
    """Time, operations and bytes of each part of attention in each inference run, over all layers.

    Returns:
        The run; part; total_ms, measured; flops and bytes, of `accounting`, for float32.
    """
    kernels = kernels[(kernels.status == "ok") & (kernels["pass"] == "forward")]
    inside = kernels[("/" + kernels.range + "/").str.contains("/attention/", regex=False)].copy()
    inside["part"] = inside.range.str.split("/").str[-1]
    around = inside.part.isin(["scores", "values"]) & (inside["class"] != "matmul")
    inside.loc[around, "part"] = "scale and mask"  # and the copies that a matmul asks for
    sums = inside.groupby([*_RUN, "part"]).total_ms.sum().reset_index()
    counted = [_attention_counts(row) for row in sums.to_dict("records")]
    return sums.assign(flops=[flops for flops, _ in counted], bytes=[moved for _, moved in counted])


def _attention_counts(run: dict[str, Any]) -> tuple[int, int]:
    size = model_size(run["model_size"], run["edition"])
    shape = run["batch_size"] * size.num_heads, run["context_length"], size.d_head
    counts = accounting.attention_part_flops(*shape), accounting.attention_part_bytes(*shape)
    flops, moved = (size.num_layers * count[run["part"]] for count in counts)
    return flops, moved


def softmax_over_matmuls(parts: pd.DataFrame) -> pd.DataFrame:
    """The softmax over attention's two matmuls in each run: time_ratio, flops_ratio, bytes_ratio."""
    measures = ["total_ms", "flops", "bytes"]
    softmax = parts[parts.part == "softmax"].set_index(_RUN)[measures]
    matmuls = parts[parts.part.isin(["scores", "values"])].groupby(_RUN)[measures].sum()
    ratio = (softmax / matmuls).set_axis(["time_ratio", "flops_ratio", "bytes_ratio"], axis="columns")
    return ratio.reset_index()


def two_profilers(kernels: pd.DataFrame) -> pd.DataFrame:
    """GPU time of each class in the runs that both GPU profilers saw, in ms, and the ratio of the two."""
    keys = [*_RUN[1:], "pass", "class"]
    kernels = kernels[(kernels.status == "ok") & kernels.profiler.isin(["nsys", "torch cuda"])]
    times = kernels.pivot_table(index=keys, columns="profiler", values="total_ms", aggfunc="sum")
    times = times.reindex(columns=["nsys", "torch cuda"]).rename_axis(columns=None)
    seen_twice = times.notna().groupby(keys[:-1]).transform("any").all(axis="columns")
    times = times[seen_twice].fillna(0.0)
    return times.assign(ratio=times["nsys"] / times["torch cuda"]).reset_index()


def beside_wall_clock(ranges: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Whole profiled steps beside the mean of the same steps without a profiler.

    Args:
        ranges: of the table "ranges".
        times: of the table "model_times".

    Returns:
        The profiled steps with wall_clock_ms; profiled_ms, the same under the profiler; gpu_busy_ms; and
        idle_percent, the part of the wall clock without a kernel running.
    """
    run = ["edition", "model_size", "batch_size", "context_length", "dtype", "pass", "implementation"]
    unseen = times.query("warmup_steps == 5 and status == 'ok'").rename(columns={"mean_ms": "wall_clock_ms"})
    whole = ranges.query("range == 'measure' and status == 'ok'").merge(
        unseen[[*run, "wall_clock_ms"]], on=run
    )
    whole = whole.rename(columns={"host_ms": "profiled_ms", "device_busy_ms": "gpu_busy_ms"})
    return whole.assign(idle_percent=100 * (1 - whole.gpu_busy_ms / whole.wall_clock_ms).clip(lower=0))
