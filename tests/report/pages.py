"""Looks at a report as a strict reader does: every element closed, nothing run, nothing asked for from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from hpcllm.report.command import make
from hpcllm.report.runs import read_runs

SECTIONS = (
    "Summary",
    "Loss",
    "Learning rate and gradient norm",
    "Throughput",
    "Communication",
    "Where the time goes",
    "Memory",
    "Energy and cost",
    "Checkpoints and starts",
    "Machine",
    "Run file",
)
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Checks as it reads: elements close in order, ids stand once, nothing is asked for or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.ids, self.headings, self.pictures, self.words = [], [], [], 0, []
        self.feed(html)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "iframe", "object", "embed", "link", "img", "base")
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#")
                assert name != "src"
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)
        self.pictures += tag == "svg" and ("class", "swatch") not in attributes

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(*folders: Path) -> str:
    """Its HTML, once it has been looked at."""
    html = make(read_runs(list(folders)))
    for asked in re.findall(r"url\(([^)]*)\)|@import", html):
        assert asked.startswith("#")
    assert "http" not in html
    assert len(html.encode()) < 5e6
    Page(html)
    return html
