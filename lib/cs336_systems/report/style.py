"""One look for every figure: colours that keep their meaning, calm axes, lines that tell the machine."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import seaborn as sns
from matplotlib.colors import to_hex, to_rgb
from matplotlib.typing import ColorType

from cs336_systems.report.words import ordered

# Okabe & Ito, "Color Universal Design" (2008): told apart with every common kind of colour vision.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, GREY = "#D55E00", "#CC79A7", "#7F868F"
INK, MUTED, GRID, PAPER = "#22272E", "#6B7280", "#E5E7EB", "#FFFFFF"
ZONE, HATCH = "#F3F4F6", "#C4C9D1"  # where nothing could be measured

# A family's colours are told apart from each other; two families may share a colour, never a plot's hue.
COLORS: dict[str, dict[str, str]] = {
    "implementation": {
        "eager": BLUE,
        "reference": BLUE,
        "compiled": VERMILLION,
        "compiled_blocks": ORANGE,
        "sdpa": INK,
        "flash_pytorch": SKY,
        "flash_compiled": PURPLE,
        "flash_triton": GREEN,
    },
    "peer": {  # of fused attention
        "reference": BLUE,
        "compiled": VERMILLION,
        "sdpa_efficient": ORANGE,
        "sdpa_flash": PURPLE,
        "flex": SKY,
        "sdpa_cudnn": INK,
        "flash_triton": GREEN,
    },
    "variant": {  # of one code: compiled or not, with TF32 matrix products or without
        "eager": BLUE,
        "compiled": VERMILLION,
        "compiled per block": ORANGE,
        "eager, TF32": SKY,
        "compiled, TF32": PURPLE,
        "compiled per block, TF32": GREEN,
    },
    "wrapper": {  # of a model, for training on several GPUs
        "one process": GREY,
        "naive": ORANGE,
        "flat": SKY,
        "overlapped": GREEN,
        "bucketed": BLUE,
        "PyTorch's DDP": INK,
    },
    "collective": {
        "all-reduce": BLUE,
        "all-gather": GREEN,
        "reduce-scatter": ORANGE,
        "broadcast": PURPLE,
    },
    "dtype": {"float32": BLUE, "tf32": SKY, "bfloat16": VERMILLION, "float16": PURPLE},
    "pass": {"forward": SKY, "backward": ORANGE, "forward_backward": BLUE, "train_step": INK},
    "machine": {"reference": GREEN, "this machine": ORANGE, "published": GREY},
    "whose": {"ours": GREEN, "PyTorch's own": INK, "others, published": GREY},  # an entry of a leaderboard
    "kernel": {  # a pass, and the least it can take
        "forward": BLUE,
        "forward, floor": SKY,
        "backward": VERMILLION,
        "backward, floor": ORANGE,
    },
}
_SPARE = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK]

STYLE = {
    "figure.dpi": 160,
    "savefig.dpi": 160,
    "figure.facecolor": PAPER,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.facecolor": PAPER,
    "axes.edgecolor": "#C4C9D1",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.5,
    "axes.labelpad": 7.0,
    "axes.linewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.9,
    "xtick.color": "#C4C9D1",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 4,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "cs336",
}


def palette(values: Sequence[Hashable], column: str) -> dict[Hashable, str]:
    """A colour for each value of a column: its fixed one, a ramp for what is ordered, or a spare one."""
    values = ordered(values, column)
    family = COLORS.get(column, {})
    if column in ("model_size", "model") or (len(values) > 1 and not any(isinstance(v, str) for v in values)):
        return dict(zip(values, ramp(len(values)), strict=True))
    fixed = {value: family[value] for value in values if value in family}
    spare = iter([color for color in _SPARE if color not in fixed.values()] * (1 + len(values)))
    return {value: fixed.get(value) or next(spare) for value in values}


def ramp(steps: int) -> list[str]:
    """Light to dark, for ordered values: lightness alone tells them apart."""
    return [to_hex(color) for color in sns.color_palette("crest", as_cmap=True)(np.linspace(0.08, 1, steps))]


@dataclass(frozen=True)
class MachineStyle:
    """How one machine's lines and bars are drawn, whatever their colour."""

    linestyle: str | tuple = "-"
    marker: str = "o"
    hollow: bool = False
    linewidth: float = 2.0
    hatch: str | None = None
    fade: float = 0.0  # share of grey mixed into the colour


_PUBLISHED = (("s", None), ("D", "...."), ("^", "xxxx"), ("v", "----"))  # marker, hatch


def machine_style(where: str, published_index: int = 0) -> MachineStyle:
    """The reference: solid, dots; this machine: dashed, diamonds; published measurements: hollow, greyish."""
    if where.startswith("published"):
        marker, hatch = _PUBLISHED[published_index % len(_PUBLISHED)]
        return MachineStyle((0, (1, 2)), marker, hollow=True, linewidth=1.5, hatch=hatch, fade=0.5)
    if where.startswith("this machine"):
        return MachineStyle((0, (3, 1.6)), "D", hatch="////")
    return MachineStyle()


def faded(color: str, share: float) -> str:
    """Mix a colour with grey."""
    return to_hex(
        [(1 - share) * c + share * g for c, g in zip(to_rgb(color), to_rgb("#9AA0A8"), strict=True)]
    )


def text_color(color: ColorType) -> str:
    """The colour, darkened until it can be read as text on paper (contrast 4 and more)."""
    shares = np.linspace(0, 1, 21)
    mixes = ([(1 - s) * c + s * i for c, i in zip(to_rgb(color), to_rgb(INK), strict=True)] for s in shares)
    return next(to_hex(mix) for mix in mixes if 1.05 / (_luminance(mix) + 0.05) >= 4)


def readable_on(background: ColorType) -> str:
    """Dark or light text, whichever has more contrast (WCAG 2.2) with the background."""
    light = _luminance(background) + 0.05
    return INK if light / (_luminance(INK) + 0.05) > 1.05 / light else PAPER


def _luminance(color: ColorType) -> float:
    """Relative luminance, 0 black to 1 white (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
