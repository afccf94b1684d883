"""Pages of the documentation whose text stands elsewhere in the repository, made by MkDocs' hooks at build time.

    README.md                               index.md, the front page
    CONTRIBUTING.md CHANGELOG.md, README.md of jobscripts/ and tests/, results of perf/     as they are, with pictures
    the schema of run files, argparse       reference/run-file.md, reference/commands.md
    <!-- include: jobscripts/lumi/env.sh -->     in a page: that file as a block of code

So nothing is written twice, and a key or an option that is new is in the reference with the next build.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hpcllm.cli import main as command_line
from hpcllm.config import reference

ROOT = Path(__file__).parents[1]
PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "jobscripts/README.md": "how-to/job-scripts.md",
    "tests/README.md": "tests.md",
    "tests/mpi_libraries/results.md": "results/mpi_libraries.md",
    **{f"perf/{path.name}": f"results/{path.name}" for path in sorted((ROOT / "perf").glob("*.md"))},
    **{f"perf/plan/{path.name}": f"results/plan/{path.name}" for path in sorted((ROOT / "perf/plan").glob("*.md"))},
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
INCLUDE = re.compile(r"<!-- include: (\S+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files of the repository that they show or link to."""
    linked: set[str] = set()
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=titled(source, relinked(text, source, page))))
        linked.update(files_of(text, source))
    for path in sorted(linked):
        files.append(File.generated(config, place_of(path), abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "results/index.md", content=results_page()))
    files.append(File.generated(config, "reference/run-file.md", content=run_file_page()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Put the files that a page includes in their places."""
    return INCLUDE.sub(lambda found: fenced((ROOT / found[1]).read_text(encoding="utf-8"), "bash"), markdown)


def relinked(text: str, source: str, page: str) -> str:
    """Turn links between files of the repository into links between pages of the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        return found[1] + posixpath.relpath(place_of(target), posixpath.dirname(page) or ".") + found[3]

    return LINK.sub(link, text)


def place_of(target: str) -> str:
    """Return where a file of the repository is in the site."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def files_of(text: str, source: str) -> Iterator[str]:
    """Yield what a page links to and neither is a page nor lies in docs/, as paths from the root of the repository."""
    for found in LINK.finditer(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def titled(source: str, text: str) -> str:
    """Give a page that begins with a table or a sentence a heading: the name of its file."""
    if text.startswith("# "):
        return text
    return f"# {Path(source).stem.replace('_', ' ').capitalize()}\n\n{text}"


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def results_page() -> str:
    """Make the list of results, each with the first sentence of its page."""
    lines = [
        "# Results\n",
        "Measured figures stand in these pages alone; each names the script that made it. Raw numbers",
        "lie beside them in `perf/`, as JSON. They were made on CPUs: **nothing here is from a GPU**, and the",
        "planner's comparison is with runs that others published.\n",
    ]
    for source, page in PAGES.items():
        if page.startswith("results/"):
            text = (ROOT / source).read_text(encoding="utf-8").strip()
            title = titled(source, text).splitlines()[0].removeprefix("# ").rstrip(":.")
            lines.append(f"- [{title}]({page.removeprefix('results/')})")
    return "\n".join(lines) + "\n"


def run_file_page() -> str:
    """Make the reference of run files, a table for each table."""
    lines = [
        "# Run-file keys\n",
        "Made from the schema, `hpcllm/config/schema.py`. `hpcllm keys` shows the same in a terminal, and",
        "`hpcllm init RUN.toml` writes a commented file. Any key can be set on the command line: `--set mesh.dp=4`.\n",
    ]
    table = ""
    every_key = reference.keys()
    for key in every_key:
        if key.table != table:
            table = key.table
            lines += [f"\n## [{table}]\n", "| key | default | type | meaning |", "|---|---|---|---|"]
        about = f"{key.about}; valid: {key.valid}" if key.about and key.valid else key.about or key.valid
        cells = f"`{key.name}`", f"`{key.default}`", key.type, about
        lines.append("| " + " | ".join(escaped(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def escaped(cell: str) -> str:
    """Return a cell of a table as text: outside of code, no markup."""
    text = cell.replace("|", "\\|")
    return text if text.startswith("`") else text.replace("<", "&lt;").replace("*", "\\*")


def commands_page() -> str:
    """Make the reference of commands: the help text of each, and of each command in it."""
    os.environ["COLUMNS"] = "80"
    lines = ["# Commands\n", "Made from the commands themselves: what `hpcllm COMMAND --help` prints.\n"]
    for name, about in command_line.COMMANDS.items():
        lines += [f"## {name}\n", about[:1].upper() + about[1:] + ".\n"]
        lines += [fenced(each.format_help()) for each in with_subcommands(parser_of(name))]
    return "\n".join(lines)


def parser_of(command: str) -> argparse.ArgumentParser:
    return subparsers(command_line.make_parser([command]))[command]


def with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of the commands in it."""
    yield parser
    for each in subparsers(parser).values():
        yield from with_subcommands(each)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(groups[0].choices) if groups else {}
