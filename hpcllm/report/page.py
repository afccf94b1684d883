"""The page around sections: one HTML file with its style inside, light or dark as the reader's system, fit to print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hpcllm.printable import printable

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #666; --sheet: #fff; --line: #d5d5d5; --best: #e3f2e6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --faint: #a0a0a0; --sheet: #16181b; --line: #3a3d42; --best: #1f3a28 }
}
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; background: var(--sheet); color: var(--ink);
  font: 16px/1.45 "DejaVu Sans", Verdana, Arial, sans-serif }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; border-bottom: 1px solid var(--line); margin: 2.2rem 0 .8rem; break-after: avoid }
p, td, th, li { font-size: .875rem }
p.faint, caption { color: var(--faint) }
nav a { margin-right: .9rem; font-size: .875rem; color: inherit }
table { border-collapse: collapse; margin: .6rem 0 }
th, td { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line) }
td.value { overflow-wrap: anywhere }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; max-width: 15rem }
td.best { background: var(--best); font-weight: bold }
figure { margin: .6rem 0; overflow-x: auto; break-inside: avoid }
figure svg { max-width: 100%; height: auto }
figure.wide svg { max-width: none }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .2rem 0; font-size: .8rem }
.swatch { vertical-align: middle; margin-right: .4rem }
pre { font-size: .75rem; overflow-x: auto; border: 1px solid var(--line); padding: .6rem }
@media print {
  :root { --ink: #000; --faint: #444; --sheet: #fff; --line: #bbb; --best: #e8e8e8 }
  body { max-width: none; margin: 0; font-size: 11pt }
  nav { display: none }
  pre { white-space: pre-wrap }
  figure.wide svg { max-width: 100% }
}
"""


@dataclass(frozen=True)
class Section:
    """body: HTML. An empty one is left out."""

    title: str
    body: str

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """title: plain text. lead: HTML below it."""
    shown = [section for section in sections if section.body]
    links = "\n".join(f'<a href="#{section.anchor}">{text(section.title)}</a>' for section in shown)
    bodies = "\n".join(
        f'<section>\n<h2 id="{section.anchor}">{text(section.title)}</h2>\n{section.body}\n</section>'
        for section in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{text(title)}</h1>\n{lead}\n<nav>\n{links}\n</nav>\n{bodies}\n</body>\n</html>\n"
    )


def text(words: object) -> str:
    """Plain text as HTML shows it: whatever it says, it does nothing."""
    return escape(printable(str(words)))


def paragraph(words: str, faint: bool = False) -> str:
    return f'<p class="faint">{text(words)}</p>' if faint else f"<p>{text(words)}</p>"


def picture(svg: str, legend: Sequence[tuple[str, str]] = (), wide: bool = False) -> str:
    """svg: "" makes no picture. legend: (swatch as HTML, words) for each thing in it."""
    if not svg:
        return ""
    entries = "".join(f"<span>{mark}{text(words)}</span>" for mark, words in legend)
    below = f'\n<div class="legend">{entries}</div>' if entries else ""
    return f"<figure{' class=' + chr(34) + 'wide' + chr(34) if wide else ''}>\n{svg}{below}\n</figure>"


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A table of two columns: what, value."""
    cells = ((text(name), text(value)) for name, value in rows)
    lines = "\n".join(f'<tr><th>{name}</th><td class="value">{value}</td></tr>' for name, value in cells)
    return f"<table>\n{lines}\n</table>" if rows else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], best: frozenset[tuple[int, int]] = frozenset()) -> str:
    """The first column is text, the others are numbers. best: (row, column) of cells that are marked."""
    if not rows:
        return ""
    top = "".join(f"<th{_number(k)}>{text(cell)}</th>" for k, cell in enumerate(head))
    lines = []
    for number, row in enumerate(rows):
        cells = (f"<td{_number(k, (number, k) in best)}>{text(cell)}</td>" for k, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _number(column: int, is_best: bool = False) -> str:
    kinds = ["number"] * (column > 0) + ["best"] * is_best
    return f' class="{" ".join(kinds)}"' if kinds else ""
