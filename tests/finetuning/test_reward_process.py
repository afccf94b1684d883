"""The process that calls a reward function: what it returns, and words for all that a function can do wrong."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcllm.config.schema import RewardConfig
from hpcllm.errors import ConfigError, RewardError
from hpcllm.finetuning.reward_process import Scored, exact, open_reward_process

ROWS = [
    Scored("2 + 2 =", " 4", "4"),
    Scored("ä\n\"b' =", "\x00 \U0001f600 five\n", ""),
    Scored("", "", "x" * 100_000),
]
GOOD = """
import math
def length(prompt, text, answer):
    print("said", len(prompt))
    return len(text)
def sum_of_all(prompt, text, answer):
    return math.fsum([len(prompt), len(text), len(answer)])
def is_right(prompt, text, answer):
    return text.strip() == answer
def helped(prompt, text, answer):
    from beside_it import three
    return three()
def of_numpy(prompt, text, answer):
    import numpy
    return numpy.float32(0.5)
def launcher(prompt, text, answer):
    import os
    return sum(name.startswith(("PMI_", "OMPI_", "SLURM_")) for name in os.environ)
"""


@pytest.fixture
def settings(tmp_path) -> RewardConfig:
    """Settings of a file in a folder with a space in its name."""
    folder = tmp_path / "my rewards"
    folder.mkdir()
    (folder / "beside_it.py").write_text("def three():\n    return 3\n")
    (folder / "reference.py").write_text("")  # as a file of ours is called
    (folder / "reward.py").write_text(GOOD)
    return RewardConfig(file=str(folder / "reward.py"), limit_s=20.0)


def test_rewards_are_those_of_the_function(settings, monkeypatch, capfd):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    wanted = {
        "length": [len(row.text) for row in ROWS],
        "sum_of_all": [sum(map(len, row)) for row in ROWS],
        "is_right": [1.0, 0.0, 0.0],
        "helped": [3.0] * 3,
        "of_numpy": [0.5] * 3,
        "launcher": [0.0] * 3,
    }
    with open_reward_process() as process:
        for name, rewards in wanted.items():
            named = dataclasses.replace(settings, function=name)
            process.check(named)
            found = process.rewards(named, ROWS)
            assert found == rewards
            assert all(type(value) is float for value in found)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "said 7" in printed.err


def test_exact_leaves_white_space_aside():
    rows = [Scored("p", text, "a b") for text in ("a b", " a b\n", "a  b", "A b", "", "a b c")]
    assert exact(rows) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1 / 0", r"failed with ZeroDivisionError: division by zero \(line 3\)"),
        ("return float('nan')", r"failed with ValueError: it returned nan; valid: a finite number"),
        ("return -float('inf')", r"it returned -inf; valid: a finite number"),
        ("return 'good'", r"failed with TypeError: it returned 'good', a str; valid: a number"),
        ("return None", r"it returned None, a NoneType; valid: a number"),
        ("return [1.0]", r"it returned \[1.0\], a list; valid: a number"),
        ("raise SystemExit(3)", r"failed with SystemExit: 3"),
        ("import os; os._exit(7)", r"ended its process, with exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", r"ended its process, by signal 11"),
        ("while True: pass", r"took longer than finetuning\.reward\.limit_s = 1"),
        ("raise ValueError('\\x1b[2J' + 10**6 * 'x')", r"failed with ValueError: [^\x1b]{0,20}x{100,500}"),
        ("return prompt.no_such", r"AttributeError"),
        ("import os; os.close(0); os.close(1); os.close(2); return 1 / 0", r"ZeroDivisionError"),
        ("return reward(prompt, text, answer)", r"RecursionError"),
    ],
)
def test_what_a_function_does_wrong_is_said_with_its_text(tmp_path, body, words):
    path = tmp_path / "reward.py"
    path.write_text(f"def reward(prompt, text, answer):\n    if text == 'bad':\n        {body}\n    return 1\n")
    settings = RewardConfig(file=str(path), limit_s=1.0)
    rows = [Scored("p1", "good", ""), Scored("p2", "bad", ""), Scored("p3", "good", "")]
    with open_reward_process() as process:
        assert process.rewards(settings, rows[:1]) == [1.0]
        with pytest.raises(RewardError, match=words) as caught:
            process.rewards(settings, rows)
    assert str(caught.value).startswith(f"finetuning.reward: reward of {str(path)!r} ")
    assert str(caught.value).endswith("for the prompt 'p2' and the text 'bad'")
    assert len(str(caught.value)) < 1000
    assert process.process.returncode is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "FileNotFoundError"),
        ("def reward(:", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def other(prompt, text, answer): return 1", "there is no function 'reward'; valid: other"),
        ("reward = 3", "there is no function 'reward'; valid: none of this file"),
        ("import sys; sys.exit('no')", "SystemExit: no"),
    ],
)
def test_a_file_that_cannot_be_used_is_rejected(tmp_path, text, words):
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)
    with (
        open_reward_process() as process,
        pytest.raises(ConfigError, match="valid: a Python file with a function") as e,
    ):
        process.check(RewardConfig(file=str(path)))
    assert words in str(e.value)


def test_a_function_of_too_few_arguments_is_named(settings, tmp_path):
    path = tmp_path / "few.py"
    path.write_text("def reward(text): return 1\n")
    with open_reward_process() as process, pytest.raises(RewardError, match="takes 1 positional argument"):
        process.rewards(dataclasses.replace(settings, file=str(path)), ROWS[:1])


def test_a_process_whose_parent_is_killed_ends_by_itself():
    """It waits for its parent's requests, so it ends when there is nobody to send one."""
    code = (
        "import time; from hpcllm.finetuning.reward_process import open_reward_process as o\n"
        "with o() as p: print(p.process.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while _is_there(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.stdout.close()


def _is_there(process: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        os.kill(process, 0)
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
