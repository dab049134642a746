import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from labbook.labels import vocabulary
from labbook.style import COLORS, VERMILLION, palette

FAMILIES = vocabulary().families

# Complete deuteranopia, protanopia and tritanopia on linear RGB (Machado, Oliveira & Fernandes 2009).
VISION = {
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.01182 0.04294 0.968881",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.3039",
}


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


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("column", FAMILIES)
def test_colours_of_a_family_are_told_apart_by_every_eye(column, vision):
    for family in FAMILIES[column]:
        colors = {value: COLORS[named.color] for value, named in family.items() if named.color}
        for one, other in itertools.combinations(colors, 2):
            distance = np.linalg.norm(seen(colors[one], vision) - seen(colors[other], vision))
            assert distance > 15, f"{one} and {other} look alike with {vision}: {distance:.1f}"


def test_values_without_a_fixed_colour_get_one_that_is_free_and_sizes_darken():
    assert palette(["mine", "compiled"], "implementation")["compiled"] == VERMILLION
    assert len(set(palette(["eager", "compiled", "mine", "yours"], "implementation").values())) == 4
    assert len(palette([f"case {i}" for i in range(30)], "strategy")) == 30
    lightness = [seen(color, "tritanopia")[0] for color in palette(range(7), "d_head").values()]
    assert np.all(np.diff(lightness) < -5)
