"""A report as data, section by section, and the page made of it by page.html.jinja, which escapes every value."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hpcllm.system.text import printable


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar = "text"
    words: str
    faint: bool = False


@dataclass(frozen=True)
class Pairs:
    """A table of two columns: name, value."""

    kind: ClassVar = "pairs"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tiles:
    """Large numbers beside each other: name, value, what stands below it."""

    kind: ClassVar = "tiles"
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table:
    """A table whose first column is text and whose others are numbers."""

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of cells that are marked
    summary: str = ""  # folded away under it


@dataclass(frozen=True)
class Figure:
    """An image inside the page. What a user named stands in alt and caption, where it can be shown in every script."""

    kind: ClassVar = "figure"
    sources: Sequence[str]  # data URIs: for a light page, and another for a dark one if the image is transparent
    alt: str  # what it shows, for who cannot see it
    caption: str = ""
    wide: bool = False  # in its own width, however narrow the page
    hover: str = ""  # JSON of its curves for hover.js


@dataclass(frozen=True)
class Verbatim:
    """Preformatted text, folded away under a summary if it has one."""

    kind: ClassVar = "verbatim"
    text: str
    summary: str = ""
    open: bool = False  # unfolded at first


Block = Text | Pairs | Tiles | Table | Figure | Verbatim


@dataclass(frozen=True)
class Section:
    """One heading with its blocks; a section without blocks is left out."""

    title: str  # ours, never a user's
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The heading's id."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


def render(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """HTML of the page. lead: blocks below the title."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["printable"] = printable
    template, script = (
        resources.files("hpcllm.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html.jinja", "hover.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # the browser runs this script alone
    shown = [section for section in sections if section.blocks]
    page = environment.from_string(template)
    return page.render(title=title, lead=lead, sections=shown, script=Markup(script), digest=digest) + "\n"
