"""Every role, state and stretch has a colour, which can be told from both grounds."""

import re

import plotly.graph_objects as go
import pytest

from shared import palette
from shared.domain.instance import InstanceState, Role
from shared.timeline import Span

LOUD = (palette.PREFILL, palette.DECODE, palette.TRANSFER, palette.IDLE, palette.GOOD, palette.BAD, *palette.SERIES)


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_left_without_a_colour() -> None:
    assert set(palette.ROLE) == set(Role)
    assert set(palette.STATE) == set(InstanceState)
    assert set(palette.STAGE) == set(Span)


def test_colours_are_six_hexadecimal_digits() -> None:
    for colour in (*palette.ROLE.values(), *palette.STATE.values(), *palette.STAGE.values(), *palette.SERIES):
        assert re.fullmatch("#[0-9a-f]{6}", colour)


@pytest.mark.parametrize("ground", [palette.LIGHT, palette.DARK])
def test_it_can_be_seen_on_both_grounds(ground: palette.Ground) -> None:
    for colour in LOUD:
        assert contrast(colour, ground.page) >= 2.5, colour
    assert contrast(ground.text, ground.page) >= 10
    assert contrast(ground.soft, ground.page) >= 4.5
    assert contrast(ground.soft, ground.panel) >= 4.5


def test_series_are_told_apart() -> None:
    assert len(set(palette.SERIES)) == len(palette.SERIES)


@pytest.mark.parametrize("scale", [palette.ROLES, palette.KV, palette.LOAD])
def test_a_scale_spans_all_values(scale: palette.Scale) -> None:
    places = [place for place, _ in scale]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert go.Heatmap(z=[[0.0, 1.0]], colorscale=scale).colorscale


def test_kinds_fill_equal_steps() -> None:
    assert palette.steps("#000000", "#ffffff") == [
        (0.0, "#000000"),
        (0.5, "#000000"),
        (0.5, "#ffffff"),
        (1.0, "#ffffff"),
    ]
