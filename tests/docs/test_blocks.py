"""What README and the documents show can be typed as it stands: every block runs, and its output is what comes."""

from __future__ import annotations

import re

import blocks
import pytest
from blocks import PAGES, ROOT, Block, Folder, blocks_of

from hpcllm.config.schema import parse

EVERY = [block for page in PAGES for block in blocks_of(page)]
TO_RUN = [page for page in PAGES if any(block.runs for block in blocks_of(page))]
LONG = (
    "laptop", "huggingface", "resume", "checkpoint", "measure", "planner", "collectives", "low-rank-adapters",
    "preferences", "evaluate", "generate", "rewards", "README",
)  # fmt: skip
IN_CI = ("laptop", "README")
FULL = {
    name: pytest.mark.full(reason="many starts of PyTorch, searches or training", in_ci=name in IN_CI) for name in LONG
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=FULL.get(page.stem, ())) for page in TO_RUN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run_one_after_another(page, tmp_path):
    folder = Folder(tmp_path)
    for block in blocks_of(page):
        if name := block.notes.get("save as"):
            (tmp_path / name).write_text(block.text, encoding="utf-8")
        if block.runs:
            assert folder.run(block) == []


@pytest.mark.parametrize("block", [each for each in EVERY if each.language == "toml"], ids=lambda block: block.place)
def test_a_run_file_that_is_shown_is_one(block):
    parse(block.text, origin=block.place)


def test_every_block_of_code_says_its_language_and_why_it_is_not_run():
    wrong = [block.place for block in EVERY if block.language not in ("bash", "console", "python", "toml", "text")]
    assert wrong == []
    excused = [block for block in EVERY if "not run" in block.notes]
    assert [block.place for block in excused if len(block.notes["not run"].split()) < 2] == []
    assert len(TO_RUN) > 10
    assert sum(block.runs for block in EVERY) > len([block for block in excused if "cluster" not in block.notes])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_exists(page):
    """Blocks that are not run too: `hpcllm COMMAND` and the scripts that they start."""
    from hpcllm.cli.main import COMMANDS

    for block in blocks_of(page):
        if block.language not in ("bash", "console"):
            continue
        for command in re.findall(r"\bhpcllm (?!=)([a-z]\w*)", re.sub(r"#.*", "", block.text)):
            assert command in COMMANDS or "clone" in block.text, f"{block.place}: hpcllm {command}"
        for script in re.findall(r"(?:jobscripts|tests|perf)/\w[\w/]*\.(?:sh|sbatch|pbs)", block.text):
            assert (ROOT / script).exists(), f"{block.place}: {script}"


@pytest.mark.parametrize(
    ("shown", "line", "same"),
    [
        ("rank 0  F0 F1", "rank 0   F0 F1", True),
        ("rank 0  F0 F1", "rank 0  F0 F2", False),
        ("  1  65.2  76.43", "1 65.4 76.9", True),
        ("  1  65.2  76.43", "1 67.4 76.4", False),
        ("all 153 blocks ...", "all 153 blocks are whole", True),
        ("all 153 blocks", "all 153 blocks are whole", False),
    ],
)
def test_how_output_is_compared(shown, line, same):
    assert blocks.shows(shown, line) == same


def test_lines_that_are_shown_have_to_come_in_their_order():
    block = Block(ROOT / "README.md", 1, "console", "$ a \\\n  b\none\ntwo\n$ c\n", {})
    assert blocks.commands_and_output(block) == [("a \\\n  b", ["one", "two"]), ("c", [])]
    assert blocks.missing(["one", "two"], "zero\none\ntwo") == []
    assert blocks.missing(["two", "one"], "zero\none\ntwo") == ["one"]
