"""What the kernel rows of profiled models say, run by run: classes, leading kernels, attention's parts."""

from collections.abc import Callable

import pandas as pd

from cs336_systems import accounting
from cs336_systems.configs import model_size
from cs336_systems.measure.profile import class_shares, stages, top_kernels, within
from cs336_systems.report.words import SCOPES

_RUN = ["profiler", "implementation", "attention", "edition", "model_size", "batch_size", "context_length"]
_RUN += ["dtype"]


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
    return _of_each_run(scoped, class_shares)


def leaders(scoped: pd.DataFrame) -> pd.DataFrame:
    """The kernel with most time in each run and scope: kernel, class, calls, total_ms, share."""
    named = scoped[scoped.kernel != "rest"]
    found = _of_each_run(named, lambda rows: top_kernels(rows, 1))
    # its share of all the time, and not of the named kernels' alone
    whole = scoped.groupby([*_RUN, "scope"]).total_ms.sum().rename("whole_ms")
    found = found.join(whole, on=[*_RUN, "scope"])
    return found.assign(share=found.total_ms / found.whole_ms).drop(columns="whole_ms")


def _of_each_run(scoped: pd.DataFrame, summary: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    keys = [*_RUN, "scope"]
    tables = [summary(rows).assign(**dict(zip(keys, key, strict=True))) for key, rows in scoped.groupby(keys)]
    nothing = pd.DataFrame(columns=[*keys, "kernel", "class", "calls", "total_ms", "share"])
    return pd.concat(tables, ignore_index=True) if tables else nothing


def attention_parts(kernels: pd.DataFrame) -> pd.DataFrame:
    """Time, operations and bytes of words.ATTENTION_PARTS in each inference run, over all layers.

    Returns:
        The run; part; total_ms, measured; flops and bytes, of `accounting`, for float32.
    """
    kernels = kernels[(kernels.status == "ok") & (kernels["pass"] == "forward")]
    inside = within(kernels, "attention").copy()
    inside["part"] = inside.range.str.split("/").str[-1]
    around = inside.part.isin(["scores", "values"]) & (inside["class"] != "matrix product")
    inside.loc[around, "part"] = "scale and mask"  # and the copies that a product asks for
    sums = inside.groupby([*_RUN, "part"]).total_ms.sum().reset_index()
    counted = [_attention_counts(row) for row in sums.to_dict("records")]
    return sums.assign(flops=[flops for flops, _ in counted], bytes=[moved for _, moved in counted])


def beside_each_other(kernels: pd.DataFrame) -> pd.DataFrame:
    """GPU time of each class in the runs that both GPU profilers saw, in ms, and the ratio of the two."""
    keys = [*_RUN[1:], "pass", "class"]
    kernels = kernels[(kernels.status == "ok") & kernels.profiler.isin(["nsys", "torch cuda"])]
    times = kernels.pivot_table(index=keys, columns="profiler", values="total_ms", aggfunc="sum")
    times = times.reindex(columns=["nsys", "torch cuda"]).rename_axis(columns=None)
    seen_twice = times.notna().groupby(keys[:-1]).transform("any").all(axis="columns")
    times = times[seen_twice].fillna(0.0)
    return times.assign(ratio=times["nsys"] / times["torch cuda"]).reset_index()


def softmax_over_products(parts: pd.DataFrame) -> pd.DataFrame:
    """The softmax over the two matrix products in each run: time_ratio, flops_ratio, bytes_ratio."""
    measures = ["total_ms", "flops", "bytes"]
    softmax = parts[parts.part == "softmax"].set_index(_RUN)[measures]
    products = parts[parts.part.isin(["scores", "values"])].groupby(_RUN)[measures].sum()
    ratio = (softmax / products).set_axis(["time_ratio", "flops_ratio", "bytes_ratio"], axis="columns")
    return ratio.reset_index()


def _attention_counts(run: dict) -> tuple[int, int]:
    size = model_size(run["model_size"], run["edition"])
    shape = run["batch_size"] * size.num_heads, run["context_length"], size.d_head
    counts = accounting.attention_part_flops(*shape), accounting.attention_part_bytes(*shape)
    flops, moved = (size.num_layers * count[run["part"]] for count in counts)
    return flops, moved
