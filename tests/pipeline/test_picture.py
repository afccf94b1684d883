"""A picture shows every action once, where and as long as it was, in colours that can be told apart."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.pipeline.actions import COMPUTE, Action, Op
from hpcllm.pipeline.picture import COLOURS, LEFT, Panel, draw
from hpcllm.pipeline.report import schedule_panel
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import simulate
from hpcllm.plotting import Box, Canvas, Label

SVG = "{http://www.w3.org/2000/svg}"


def made(name="zb-v", ranks=3, microbatches=4):
    return simulate(make_schedule(name, ranks, microbatches))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 6))
def test_boxes_are_as_wide_as_actions_are_long_and_stand_where_they_start(name, ranks, microbatches):
    timeline = made(name, ranks, microbatches)
    spans = [span for row in timeline.spans for span in row]
    canvas = draw([schedule_panel(timeline)], "ticks")
    scale = (canvas.width - 172) / timeline.makespan
    boxes = [shape for shape in canvas.shapes if isinstance(shape, Box)]
    drawn = sorted((box.x, box.fill) for box in boxes if box.fill in dict(COLOURS.values()) and box.height > 20)
    assert drawn == [
        (pytest.approx(x), fill)
        for x, fill in sorted((LEFT + start * scale, COLOURS[a.op][0]) for a, start, _ in spans)
    ]
    assert all(box.x + box.width <= canvas.width and box.y + box.height <= canvas.height for box in boxes)


def test_each_action_s_microbatch_can_be_read_at_the_shapes_of_courses():
    for name, (ranks, microbatches) in itertools.product(SCHEDULES, [(2, 2), (4, 8), (8, 32)]):
        timeline = made(name, ranks, microbatches)
        words = [shape for shape in draw([schedule_panel(timeline)], "ticks").shapes if isinstance(shape, Label)]
        numbers = sorted(
            int(w.text) for w in words if w.text.isdigit() and w.anchor == "middle" and w.fill != "#666666"
        )
        assert numbers == sorted(action.microbatch for row in timeline.schedule.work() for action in row)


def test_the_svg_has_a_path_for_each_box_and_strange_names_stay_text(tmp_path):
    canvas = draw([Panel('<script>"& $x_1$', made().spans, made().makespan, ("",) * 3)], "ms")
    canvas.write(tmp_path / "x.svg")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    (boxes,) = (group for group in root.iter(f"{SVG}g") if group.get("id") == "PolyCollection_1")
    styles = [path.get("style", "fill: #000000") for path in boxes.iter(f"{SVG}path")]  # SVG's own default is black
    fills = [re.search("fill: (#[0-9a-f]{6})", style)[1] for style in styles]
    assert fills == [shape.fill for shape in canvas.shapes if isinstance(shape, Box)]
    words = [shape.text for shape in canvas.shapes if isinstance(shape, Label) and shape.text]
    assert [text.text for text in root.iter(f"{SVG}text")] == words
    assert '<script>"& $x_1$' in words
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "metadata", "defs", "style", "g", "path", "text", "clipPath", "rect"}


def test_a_picture_has_the_same_bytes_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw([schedule_panel(made())], "ticks").write(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_a_legend_says_fits_the_narrowest_picture():
    """With all that it can say: W beside B, chunks and waits."""
    timeline = made("zb-v", 2, 1)
    rows = [[*row, (Action(Op.BACKWARD, 0), 9.0, 9.1)] for row in timeline.spans]
    canvas = draw([Panel("all", rows, 9.1, ("idle 0.0 %",) * 2, [[(1.0, 2.0)]] * 2)], "ms")
    words = [shape for shape in canvas.shapes if isinstance(shape, Label) and shape.anchor == "start"]
    assert len(words) == 1 + 2 + 1 + len(COLOURS) + 2
    assert all(word.x + 0.55 * word.size * len(word.text) <= canvas.width for word in words)


def grey(colour: str) -> float:
    """Relative luminance of sRGB, WCAG 2."""
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(grey, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_differ_in_greyscale_too_and_numbers_can_be_read_on_them():
    assert set(COLOURS) == COMPUTE
    for (one, _), (other, _) in itertools.combinations(COLOURS.values(), 2):
        assert contrast(one, other) >= 1.4
    assert all(contrast(fill, ink) >= 4.5 for fill, ink in COLOURS.values())  # WCAG 2's level AA


@pytest.mark.parametrize("suffix", [".svg", ".SVG", ".png"])
def test_pictures_are_written_where_a_name_has_spaces(tmp_path, suffix):
    folder = tmp_path / "my pictures"
    folder.mkdir()
    path = folder / f"a b{suffix}"
    draw([schedule_panel(made())], "ticks").write(path)
    head = path.read_bytes()[:300]
    assert b"<svg" in head if suffix.lower() == ".svg" else head.startswith(b"\x89PNG\r\n")


def test_a_picture_that_would_be_too_wide_for_a_png_is_written_smaller(tmp_path):
    Canvas(60_000, 100, (Box(0, 0, 59_000, 50, "#000000"),)).write(tmp_path / "wide.png")
    width = int.from_bytes((tmp_path / "wide.png").read_bytes()[16:20], "big")
    assert 10_000 < width <= 20_000
