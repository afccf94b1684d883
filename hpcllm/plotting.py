"""All drawing of the package, by matplotlib alone, in one style. Nothing is imported before something is drawn.

    with figure(9.4, [2.1, 3.0]) as (made, (upper, lower)):     plots, one under the other
        stacked_bars(upper, ...); lower.plot(...)
        save(made, path)                                        a file: .svg or .png
        data_uris(made)                                         or an image inside a page, light and dark

    (0, 0) --> x    Box(x, y, width, height)                    Canvas: boxes and labels at places in pixels,
       |            Label(x, y, ...): y is the middle of        for pictures that are no plots
       v y          the line of text, x its start, middle or end

matplotlib comes with the extra `plot`. Text is drawn as it is, never as a formula or as markup.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcllm.errors import ConfigError

ENDINGS = (".png", ".svg")
# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind readers; here light and dark take turns
LINE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a8a8a", "#b8a500")
LINE_DASHES = ("solid", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
# neighbours differ in lightness, so that they differ in greyscale too
BAR_COLOURS = ("#0072b2", "#8fcbee", "#d55e00", "#f5cf73", "#009e73", "#c8c8c8")
INK, DARK_PAGE_INK = "#1a1a1b", "#e4e4e4"  # of axes and their texts, and of nothing else
DARK_FILL = 0.3  # relative luminance below which text on a fill is white
SMALLEST_PART = 0.055  # share of the longest bar that has room for a number
PNG_DPI = 150
LARGEST_PNG_PIXELS = 20_000  # what the PNG writer and most viewers take
PIXELS_PER_INCH = 96  # of a Canvas, as CSS counts
_NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # metadata: neither versions nor times
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpcllm",  # the same bytes from the same data
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 11,
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
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "path.simplify_threshold": 0.3,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def can_draw() -> bool:
    """Return True where matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(purpose: str) -> None:
    """Raise ConfigError with the fix where matplotlib is not installed. purpose: begins the message."""
    if not can_draw():
        raise ConfigError(f"{purpose} needs matplotlib: pip install matplotlib")


def picture_path(text: str) -> Path:
    """Path of a picture that can be drawn on this machine. Raises ConfigError."""
    path = Path(text)
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"a picture {text!r} cannot be drawn; valid: a name that ends in {' or '.join(ENDINGS)}")
    require_matplotlib(f"drawing {text!r}")
    return path


@contextmanager
def figure(
    width_inches: float, heights_inches: Sequence[float], margin_inches: float = 0.0, share_x: bool = False
) -> Iterator[tuple[Any, Any]]:
    """A figure and its list of axes, one under the other, to be drawn and saved inside. Raises ConfigError.

    margin_inches: added height, for a legend above and the labels below.
    """
    with _style():
        from matplotlib.figure import Figure  # the object, not pyplot: no display, no state

        made = Figure(figsize=(width_inches, sum(heights_inches) + margin_inches), layout="constrained")
        rows = len(heights_inches)
        axes = made.subplots(rows, 1, squeeze=False, sharex=share_x, height_ratios=heights_inches)
        yield made, list(axes[:, 0])


@contextmanager
def _style() -> Iterator[None]:
    require_matplotlib("a picture")
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def save(made: Any, path: Path) -> None:
    """Write a figure as .svg or .png, as the name ends. Raises OSError."""
    ending = path.suffix.lower()[1:]
    dpi = min(PNG_DPI, LARGEST_PNG_PIXELS / max(made.get_size_inches()))
    made.savefig(path, format=ending, dpi=dpi, metadata=_NOTHING if ending == "svg" else None)


def data_uris(made: Any, themes: bool = True) -> list[str]:
    """A figure as the source of an <img>: nothing in it can run, load or meet a name of the page around it.

    themes: two of them, transparent, with the ink for a light page and for a dark one; else one on a white sheet.
    """
    file = io.StringIO()
    made.savefig(file, format="svg", transparent=themes, metadata=_NOTHING)
    texts = [file.getvalue().replace(INK, ink) for ink in ((INK, DARK_PAGE_INK) if themes else (INK,))]
    return [f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}" for text in texts]


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of curve `number`.

    Neighbours have other dashes, for who prints in black; and so have curves whose colours repeat.
    """
    dashes = (number + number // len(LINE_COLOURS)) % len(LINE_DASHES)
    return {"color": LINE_COLOURS[number % len(LINE_COLOURS)], "linestyle": LINE_DASHES[dashes]}


def logarithmic(axes: Any, *names: Literal["x", "y"]) -> None:
    """Make axes logarithmic, with plain numbers beside their marks, as powers are formulas."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, place: Any = None) -> str:
            return f"{value:g}" if super().__call__(value, place) else ""  # few of the lesser marks have a number

    for name in names:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(labelOnlyBase=False))


def stacked_bars(
    axes: Any,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colours: Sequence[str] = BAR_COLOURS,
    upright: bool = False,
    numbers: bool = False,
) -> None:
    """Draw a bar a name, the first on top (upright: on the left).

    parts: label -> its length in each bar, from the foot. numbers: each part's share where it has room, each bar's sum.
    """
    sums = [sum(lengths) for lengths in zip(*parts.values(), strict=True)]
    feet = [0.0] * len(names)
    for (label, lengths), colour in zip(parts.items(), colours, strict=False):
        place = {"bottom": feet, "width": 0.7} if upright else {"left": feet, "height": 0.7}
        draw = axes.bar if upright else axes.barh
        bars = draw(range(len(names)), lengths, color=colour, label=label, edgecolor="white", linewidth=0.5, **place)
        feet = [foot + length for foot, length in zip(feet, lengths, strict=True)]
        if numbers:
            shares = [
                f"{100 * length / total:.0f} %" if length > SMALLEST_PART * max(sums) else ""
                for length, total in zip(lengths, sums, strict=True)
            ]
            axes.bar_label(bars, shares, label_type="center", color=_ink_on(colour), fontsize=8)
    if numbers:
        axes.bar_label(bars, [f"{total:.3g}" for total in sums], padding=4, fontsize=8)
    (axes.set_xticks if upright else axes.set_yticks)(range(len(names)), names)
    axes.grid(visible=False, axis="x" if upright else "y")
    if not upright:
        axes.invert_yaxis()


def _ink_on(fill: str) -> str:
    """Colour of text that can be read on a fill, by the relative luminance of WCAG 2."""
    channels = (int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < DARK_FILL else "#222222"


def legend_beside(axes: Any) -> None:
    """Place the legend of one plot to its right."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))


def legend_above(made: Any, columns: int = 5) -> None:
    """Place one legend for all plots of a figure above them; each label once."""
    found: dict[str, Any] = {}
    for axes in made.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        made.legend(list(found.values()), list(found), loc="outside upper left", ncols=columns)


@dataclass(frozen=True)
class Box:
    """A filled rectangle of a Canvas."""

    x: float
    y: float
    width: float
    height: float
    fill: str  # "#rrggbb"


@dataclass(frozen=True)
class Label:
    """A line of text of a Canvas."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: Literal["start", "middle", "end"] = "start"
    fill: str = "#222222"


@dataclass(frozen=True)
class Canvas:
    """Boxes and labels on a white sheet; lengths in pixels."""

    width: float
    height: float
    shapes: tuple[Box | Label, ...]  # later ones cover earlier ones, but labels are never covered

    @contextmanager
    def figure(self) -> Iterator[Any]:
        """The picture as a figure, to be saved inside. Raises ConfigError."""
        with _style():
            from matplotlib.collections import PolyCollection
            from matplotlib.figure import Figure

            made = Figure(figsize=(self.width / PIXELS_PER_INCH, self.height / PIXELS_PER_INCH))
            axes = made.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
            axes.axis("off")
            boxes = [shape for shape in self.shapes if isinstance(shape, Box)]
            axes.add_collection(
                PolyCollection([_corners(box) for box in boxes], facecolors=[box.fill for box in boxes])
            )
            for label in self.shapes:
                if isinstance(label, Label):
                    align = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
                    size = label.size * 72 / PIXELS_PER_INCH
                    axes.text(
                        label.x, label.y, label.text, ha=align, va="center_baseline", fontsize=size, color=label.fill
                    )
            yield made

    def write(self, path: Path) -> None:
        """Write .svg or .png, as the name ends. Raises OSError, ConfigError."""
        with self.figure() as made:
            save(made, path)


def _corners(box: Box) -> list[tuple[float, float]]:
    right, foot = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, foot), (box.x, foot)]
