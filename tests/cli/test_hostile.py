"""Laws of what nobody means: each key of a run file x hostile values, and generated command lines, in this process.

Whatever is typed ends with exit code 0, 1, 2 or 75, without a traceback, within seconds, and no control character of
a name reaches the terminal. perf/hostile_inputs.py does the same in thousands, each in a process of its own.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import hostile
import pytest

from hpcllm.cli.main import main
from hpcllm.config.schema import key_names

LIMIT_S = 60  # of a command on a busy machine; alone the slowest takes a few seconds
CASES = 12
VALUES_OF_A_KEY = 4


def check(words: list[str], files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(text.encode(errors="surrogateescape"))
    with hostile.within(LIMIT_S):
        code = main(words)
    output, errors = capsys.readouterr()
    assert not hostile.fault(code, output, errors), (words, code, errors[-500:])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile.make(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("table", sorted({key.partition(".")[0] for key in key_names()}))
def test_every_key_with_values_that_nobody_means(table, capsys):
    draw = random.Random(table)
    for key in key_names():
        if key.startswith(f"{table}."):
            for value in draw.sample(hostile.VALUES, VALUES_OF_A_KEY):
                check(*hostile.of_run_file(draw, key, value), capsys)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("kind", [kind for kind in hostile.KINDS if kind != "files"])  # those load much
def test_generated_command_lines(kind, capsys):
    draw = random.Random(kind)
    for _ in range(CASES):
        check(*hostile.KINDS[kind](draw), capsys)


def test_command_lines_come_again_from_their_seed():
    assert list(islice(hostile.command_lines(3), 20)) == list(islice(hostile.command_lines(3), 20))
