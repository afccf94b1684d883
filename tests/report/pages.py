"""Looks at a report as a strict reader does: every element closed, one script, nothing asked for from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

from hpcllm.cli.report import make
from hpcllm.report.run_folder import read_runs

SECTIONS = (
    "Loss",
    "Where the time goes",
    "Throughput",
    "Learning rate and gradient norm",
    "Communication",
    "Memory",
    "Energy and cost",
    "Checkpoints and starts",
    "All numbers",
    "Machine",
    "Run file",
)
VOID = {"source", "meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Checks as it reads: elements close in order, ids stand once, nothing is asked for or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.ids, self.headings, self.pictures, self.words = [], [], [], 0, []
        self.scripts, self.hovers = [], []
        self.feed(html)
        self.close()
        assert not self.open
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attributes):
        assert tag not in ("svg", "iframe", "object", "embed", "link", "base")
        assert tag != "script" or not attributes
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("href", "xlink:href"):
                assert value.startswith("#")
            if name in ("src", "srcset"):
                assert tag == ("img" if name == "src" else "source")
                check_image(value)
            if name == "data-hover":
                self.hovers.append(json.loads(value))
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.pictures += 1
            assert dict(attributes)["alt"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def check_image(source: str) -> ElementTree.Element:
    """The SVG of an <img>, in which nothing runs and nothing is asked for from elsewhere."""
    kind, _, data = source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    root = ElementTree.fromstring(base64.b64decode(data, validate=True))
    for element in root.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "foreignObject", "image", "a", "animate", "set")
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert not name.endswith("href") or value.startswith("#")
            assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", value))
    return root


def page_of(*folders: Path) -> str:
    """Its HTML, once it has been looked at."""
    html = make(read_runs(list(folders)))
    words = re.sub(r'src(set)?="data:[^"]*"', "", html)  # checked by check_image
    for asked in re.findall(r"url\(([^)]*)\)|@import", words):
        assert asked.startswith("#")
    assert "http" not in words.replace("http-equiv", "")
    assert len(html.encode()) < 5e6
    ours = resources.files("hpcllm.report").joinpath("hover.js").read_text(encoding="utf-8")
    assert Page(html).scripts == [ours]
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in html  # and the browser is to run no other
    return html
