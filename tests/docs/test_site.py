"""The site is built without a warning and loads nothing from outside; README is short, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
OF_GITHUB = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "jobscripts/README.md"]
LOADS = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href|srcset)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path = tmp_path_factory.mktemp("the site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    # --strict: a broken link or anchor ends it, but not with --quiet, which drops warnings before they are counted
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return path


def test_the_site_has_its_pages(site):
    for page in ("index", "reference/run-file", "reference/commands", "results/index", "how-to/lumi", "contributing"):
        assert "<h1" in (site / f"{page}.html").read_text(encoding="utf-8")
    assert "learning_rate" in (site / "reference/run-file.html").read_text(encoding="utf-8")
    assert "usage: hpcllm train" in (site / "reference/commands.html").read_text(encoding="utf-8")
    assert "MPICH_GPU_SUPPORT_ENABLED" in (site / "how-to/lumi.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_outside(site):
    assert LOADS.search('<script src="https://cdn.example/x.js">')
    for page in site.rglob("*.html"):
        assert LOADS.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//\S*", sheet.read_text(encoding="utf-8")) == [], (
            sheet
        )


@pytest.mark.parametrize("page", OF_GITHUB, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert not link.startswith("http"), f"{link}: nobody checks links to the outside"
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short_and_shows_three_pictures():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 8192
    assert len(re.findall(r"!\[[^]]+\]\(", text)) == 3


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/pictures").glob("*.[ps][nv]g")), ids=lambda path: path.name)
def test_pictures_are_small(picture):
    assert 1000 < picture.stat().st_size < 60_000
