"""Every kind of plot, one import: each takes rows and returns a chart; `save` writes it and hands it back."""

from cs336_systems.report.blocks import grouped_bars, heatmap
from cs336_systems.report.figure import Chart, save
from cs336_systems.report.lines import ratio, sweep, trace
from cs336_systems.report.states import states

__all__ = ["Chart", "grouped_bars", "heatmap", "ratio", "save", "states", "sweep", "trace"]
