"""matplotlib's figures as pieces of a page: SVG without a name that another picture has, in the page's own colours.

    figure --savefig--> <?xml..><!DOCTYPE..><svg id=..>  ---->  <svg> with ids of its own, INK as currentColor

Nothing that a user named is drawn: such words stand in the page's text, where every script can be shown and none run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from hpcllm.errors import ConfigError

# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind readers; here light and dark take turns
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a8a8a", "#b8a500")
DASHES = ("solid", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
SVG_DASHES = ("", "6 2", "2 2", "6 2 1 2")
INK = "#010203"  # stands for the colour of the page's text
WIDTH_INCHES = 9.4
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpcllm",  # the same page from the same run
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.4,
    "path.simplify_threshold": 0.3,
}


@contextmanager
def figure(height_inches: float, rows: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """A figure and its axes, one under the other, to be drawn and given to `svg` inside. Raises ConfigError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # the object, not pyplot: no display, no state
    except ImportError as error:
        raise ConfigError("a report has pictures, which need matplotlib: pip install 'hpcllm[plot]'") from error
    with matplotlib.rc_context(_SETTINGS):
        made = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        yield made, list(made.subplots(rows, 1, squeeze=False, sharex=True)[:, 0])


def svg(made: Any, name: str, words: str) -> str:
    """The figure as an element of a page. name: unique in the page. words: what it shows, for who cannot see it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    made.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return element(text, name, words).replace(INK, "currentColor")


def element(text: str, name: str, words: str) -> str:
    """An SVG file's element for a page: no name spaces, which HTML knows by itself, and ids of its own."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1)


def swatch(number: int) -> str:
    """A short line in the colour and dashes of curve `number`, for a legend in the page."""
    dash = SVG_DASHES[_dash(number)]
    line = f'<line x1="0" y1="6" x2="24" y2="6" stroke="{colour(number)}" stroke-width="3" stroke-dasharray="{dash}"/>'
    return f'<svg class="swatch" width="24" height="12" aria-hidden="true">{line}</svg>'


def patch(fill: str) -> str:
    """A filled square for a legend."""
    square = f'<rect width="12" height="12" fill="{fill}"/>'
    return f'<svg class="swatch" width="12" height="12" aria-hidden="true">{square}</svg>'


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dashes(number: int) -> Any:
    return DASHES[_dash(number)]


def _dash(number: int) -> int:
    """Another one for each neighbour, for who prints in black; and another one each time the colours begin anew."""
    return (number + number // len(COLOURS)) % len(DASHES)
