import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from cs336_systems.report.style import (
    COLORS,
    machine_style,
    palette,
    ramp,
    readable_on,
    text_color,
)

# Complete deuteranopia, protanopia and tritanopia on linear RGB (Machado, Oliveira & Fernandes 2009).
VISION = {
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.01182 0.04294 0.968881",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.3039",
}
SAME_BY_DESIGN = {("eager", "reference")}  # the plain baseline of a model, and of attention


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def seen(color, vision):
    """CIE Lab coordinates of a colour as seen with a colour vision deficiency."""
    rgb = np.clip(np.reshape(VISION[vision].split(), (3, 3)).astype(float) @ linear(color), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one, other):
    dark, light = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] + 0.05 for color in (one, other))
    return light / dark


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("family", COLORS)
def test_colours_of_a_family_are_told_apart_by_every_eye(family, vision):
    for one, other in itertools.combinations(COLORS[family], 2):
        if (one, other) not in SAME_BY_DESIGN:
            colors = COLORS[family][one], COLORS[family][other]
            distance = np.linalg.norm(seen(colors[0], vision) - seen(colors[1], vision))
            assert distance > 15, f"{one} and {other} look alike with {vision}: {distance:.1f}"


@pytest.mark.parametrize("vision", VISION)
def test_a_ramp_darkens_step_by_step_for_every_eye(vision):
    lightness = [seen(color, vision)[0] for color in ramp(7)]
    assert np.all(np.diff(lightness) < -5)


def test_a_value_keeps_its_colour_whatever_else_is_drawn():
    alone = palette(["compiled"], "implementation")["compiled"]
    assert palette(["new", "compiled", "eager"], "implementation")["compiled"] == alone


def test_values_without_a_fixed_colour_get_one_that_is_free():
    colors = palette(["eager", "compiled", "mine", "yours"], "implementation")
    assert len(set(colors.values())) == 4


def test_more_values_than_colours_still_get_one():
    assert len(palette([f"case {i}" for i in range(30)], "case")) == 30


def test_kinds_of_machine_look_different():
    looks = [machine_style(w) for w in ("reference: H200", "this machine: cpu", "published: RTX 5090")]
    assert len({str(look.linestyle) for look in looks}) == 3
    assert len({look.marker for look in looks}) == 3  # a single point has no line
    assert [look.hollow for look in looks] == [False, False, True]
    assert machine_style("published: a", 0).marker != machine_style("published: b", 1).marker


@pytest.mark.parametrize("color", [*ramp(5), "#56B4E9", "#E69F00", "#FFFFFF", "#000000"])
def test_text_can_be_read(color):
    assert contrast(text_color(color), "#FFFFFF") >= 4
    assert contrast(readable_on(color), color) >= 4
