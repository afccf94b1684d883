"""A picture as data: boxes and words on a white sheet, written as SVG text or, through matplotlib, as PNG.

(0, 0) --> x        Box(x, y, width, height)      Words(x, y, ...): y is the middle of the line of text,
   |                                              x its start, middle or end
   v y              lengths in pixels

An SVG is text, so it needs no library; a PNG needs the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

DOTS = 150  # of a PNG, an inch
PIXELS = 100  # of a picture, an inch
MOST_DOTS = 20_000  # what the PNG writer and most viewers take


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str  # "#rrggbb"


@dataclass(frozen=True)
class Words:
    x: float
    y: float
    text: str
    size: float = 12
    anchor: Literal["start", "middle", "end"] = "start"
    fill: str = "#222222"


@dataclass(frozen=True)
class Canvas:
    width: float
    height: float
    shapes: tuple[Box | Words, ...]  # later ones cover earlier ones, but words are never covered

    def write(self, path: Path) -> None:
        """Write .svg or .png, as the name ends. Raises OSError."""
        if path.suffix.lower() == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            self._write_png(path)

    def svg(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        fonts = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif" dominant-baseline="central"'
        lines = (_svg_box(shape) if isinstance(shape, Box) else _svg_words(shape) for shape in self._in_order())
        sheet = f'<rect width="{self.width:.0f}" height="{self.height:.0f}" fill="#ffffff"/>'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts}>'
        return "\n".join([opening, sheet, *lines, "</svg>\n"])

    def _write_png(self, path: Path) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure  # the object, not pyplot: no display, no state

        figure = Figure(figsize=(self.width / PIXELS, self.height / PIXELS))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        boxes = [shape for shape in self.shapes if isinstance(shape, Box)]
        axes.add_collection(PolyCollection(list(map(_corners, boxes)), facecolors=[box.fill for box in boxes]))
        for words in self.shapes:
            if isinstance(words, Words):
                align = {"start": "left", "middle": "center", "end": "right"}[words.anchor]
                style: dict[str, Any] = {"fontsize": words.size * 72 / PIXELS, "color": words.fill, "parse_math": False}
                axes.text(words.x, words.y, words.text, ha=align, va="center_baseline", **style)
        figure.savefig(path, dpi=min(DOTS, MOST_DOTS * PIXELS / max(self.width, self.height)), format="png")

    def _in_order(self) -> Iterator[Box | Words]:
        yield from (shape for shape in self.shapes if isinstance(shape, Box))
        yield from (shape for shape in self.shapes if isinstance(shape, Words))


def _corners(box: Box) -> list[tuple[float, float]]:
    right, foot = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, foot), (box.x, foot)]


def _svg_box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
    return f'<rect {place} fill="{box.fill}"/>'


def _svg_words(words: Words) -> str:
    place = f'x="{words.x:.2f}" y="{words.y:.2f}" text-anchor="{words.anchor}" font-size="{words.size:g}"'
    return f'<text {place} fill="{words.fill}">{escape(words.text)}</text>'
