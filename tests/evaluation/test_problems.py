"""Made problems: right answers, the same for a seed, and none to measure on that could be trained on."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.cli.main import main
from hpcllm.errors import ConfigError
from hpcllm.evaluation.problems import FAMILIES, PARTS, part_of, problems

seeds = st.integers(0, 2**63 - 1)
kinds = st.sampled_from([("copy", 4), ("reverse", 5), ("sort", 4), ("addition", 2), ("induction", 9), ("needle", 3)])


def solved(family: str, question: str) -> str:
    """The answer, found from the question alone."""
    words = question.split()
    match family:
        case "copy":
            return question
        case "reverse":
            return question[::-1]
        case "sort":
            return " ".join(sorted(words))
        case "addition":
            return str(int(words[0]) + int(words[2]))
        case "induction":
            return words[words.index(words[-1]) + 1]
        case _:
            return re.findall(rf"{words[-2]} has ([0-9]+)\.", question)[0]


@given(kinds, seeds, st.sampled_from(PARTS))
@settings(max_examples=60)
def test_answers_are_right_and_no_two_problems_alike(kind, seed, part):
    family, size = kind
    found = problems(family, size, 20, seed, part)
    assert len({example.contexts for example in found}) == 20
    for example in found:
        question = example.contexts[0].removeprefix(f"{family}: ").removesuffix(" =")
        assert example.choices == (f"{solved(family, question)}\n",)
        assert part_of(example.contexts[0]) == part


@given(kinds, seeds, seeds)
@settings(max_examples=40)
def test_what_is_held_out_for_one_seed_is_not_trained_on_with_any(kind, one, other):
    trained, measured = problems(*kind, 30, one, "train"), problems(*kind, 30, other)
    assert not {e.contexts for e in trained} & {e.contexts for e in measured}
    assert problems(*kind, 30, one, "train") == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_from_the_least_to_the_largest_can_be_made(family):
    least, usual, most = FAMILIES[family].sizes
    for size in (least, usual, most):
        assert problems(family, size, 1, 0)
    for size in (least - 1, most + 1):
        with pytest.raises(ConfigError, match=rf"{family}:{size}: .* sizes from {least} to {most}"):
            problems(family, size, 1, 0)


def test_more_problems_than_there_are_is_said_with_how_many_there_are():
    with pytest.raises(ConfigError, match=r"copy:1 has no 100 problems that are held-out, [0-9] at most"):
        problems("copy", 1, 100, 0)


def test_the_command_writes_lines_to_train_on(tmp_path, capsys):
    path = tmp_path / "a text.txt"
    assert main(["problems", "sort", "--size", "3", "--count", "50", "--output", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert len(set(lines)) == 50
    assert all(part_of(line.partition("=")[0] + "=") == "train" for line in lines)
    assert main(["problems", "sort", "--size", "3", "--count", "50"]) == 0
    assert capsys.readouterr().out.endswith(path.read_text())
    assert main(["problems", "sort:3", "--count", "50"]) == 0
    assert capsys.readouterr().out == path.read_text()
    for wrong in (
        ["sort:3", "--size", "4"],
        ["sort:"],
        ["sort:x"],
        ["sort", "--size", "999"],
        ["sorts"],
        ["sort", "--count", "0"],
        ["copy", "--size", "1"],
    ):
        assert main(["problems", *wrong]) == 2
