"""Hostile command lines, made from a seed: every key, option and file of every command x values that nobody means.

    make(folder)              the files that they name: sound ones, and pipes, devices, loops, junk
    command_lines(seed)       endless: ["memory", "run.toml", "--set", "model.layers=1e400"], ...
    fault(code, said, wrote)  what is wrong with an answer; "" if nothing is
    within(seconds)           a limit of time for what has hostile input

The law: exit code 0, 1, 2 or 75, no traceback, no control character of another's making, and an error in one line. For
the tests of this folder's cli/ in one process, and for perf/hostile_inputs.py, which has hours.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hpcllm.config import machines
from hpcllm.config.machines import RANGES
from hpcllm.config.schema import key_names
from hpcllm.data import tokenizer

NUMBERS = [
    *("0", "-0", "1", "-1", "2", "3", "7", "64", "1023", "4096", "65536", "1048576", "16777216", "2147483647"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "1000000000000", "1" + "0" * 400, "9" * 5000),
    *("nan", "-nan", "inf", "-inf", "1e-320", "1e308", "-1e308", "1e400", "0.1", "0.5", "1.0", "1e-9", "1e9", "0x10"),
]
TEXTS = [
    *("true", '""', '"\\u0000"', '"\\u001b[2J\\u001b[31m"', '"\\u202e"', '"' + "x" * 300 + '"', '"../.."', '"loop"'),
    *(
        '"pipe"',
        '"endless"',
        '"sparse"',
        '"folder"',
        '"junk"',
        '"none"',
        '"/"',
        '"a/../b"',
        '"auto"',
        '"' + "é" * 99 + '"',
    ),
]
LISTS = ["[]", "[1", "[[]]", "[0]", "[-1]", "[1e9]", "[1, 2, 3]", "{}", "{ a = 1 }", "[" * 400, "1979-05-27", '["a"]']
VALUES = [*NUMBERS, *TEXTS, *LISTS]
FILES = [
    "run.toml",
    "junk",
    "pipe",
    "endless",
    "sparse",
    "loop",
    "folder",
    "none",
    "log.jsonl",
    "empty",
    "x" * 300,
    "a\nb",
]
LOGGED = [*("step", "loss", "start", "end", "memory_stages", "mesh", "slurm", "validation_loss", "checkpoint_s")]
LOGGED += ["energy_kwh", "parameters_memory_bytes", "step_s", "grad_norm", "node_hours", "learning_rate", "time"]
RECORDS: list[dict[str, Any]] = [{"loss": 2.0}, {"start": {}}, {"end": {}}, {"parameters_memory_bytes": 1}]
RECORDS += [{"validation_loss": 1}]
RUN = """[run]
steps = 4
[model]
layers = 2
hidden = 24
heads = 4
ffn = 44
vocabulary = 300
max_sequence = 16
[data]
sequence_length = 16
global_batch = 8
"""
SAID = [
    *("hello", "", " ", "<|im_end|>", "{{ 7 * 7 }}", "{% for %}", "\x00\x1b[2J", "\u202e", "\ud800", "\ufdd0"),
    "x" * 5000,
]
NO_MESSAGES: list[Any] = [[], "x", None, 5, [[]], [{}], [None], [{"role": 1}], [{"content": "x"}]]
CHATS: list[Any] = [  # rows of chats, and what is none
    *({"prompt": said, "completion": "yes"} for said in SAID),
    *({"prompt": "why", "chosen": said, "rejected": "no"} for said in SAID[:3]),
    *({"messages": [{"role": role, "content": "x"}]} for role in ("assistant", "root", "", "{{ 1 }}", "\x1b[31m")),
    *({"messages": value} for value in NO_MESSAGES),
    *({"messages": [{"role": "assistant", "content": "x"}] * count} for count in (2, 999, 1001, 100_000)),
    *(None, 1, "x", [], {}, {"chosen": "x"}, {"messages": [{"role": "user", "content": {"a": [1]}}]}),
]
JINJA = [  # chat templates: sound, wrong, endless, too large, curious
    "{% for m in messages %}<|end_of_text|>{{ m.content }}{% endfor %}",
    *("", "{{", "{% for %}", "{{ messages }}", "{{ messages[99].content }}", "{{ raise_exception('\x1b[2J') }}"),
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
    "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    *("{{ 'x' * 10 ** 12 }}", "{{ 9 ** 9 ** 9 }}", "{{ ''.__class__.__mro__ }}", "{{ open('made') }}"),
    *("{% include '/etc/passwd' %}", "{% extends 'run.toml' %}", "{{ self }}{{ cycler }}", "{{ 1 / 0 }}"),
]
GPT = "layers=4,hidden=64,heads=4,vocab=512,sequence=64"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def make(folder: Path) -> None:
    """Make the files that the command lines name, in a folder that is to be the current one."""
    (folder / "run.toml").write_text(RUN)
    (folder / "junk").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 40)
    os.mkfifo(folder / "pipe")
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").write_text(_bytes_tokenizer())
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def command_lines(seed: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield command lines, each with the files to be written before it: name -> text."""
    draw = random.Random(seed)
    kinds = list(KINDS.values())
    while True:
        yield draw.choice(kinds)(draw)


def of_run_file(draw: random.Random, key: str = "", value: str = "") -> tuple[list[str], dict[str, str]]:
    """A key of the run file, or several."""
    keys = [key] if key else draw.sample(key_names(), draw.choice([1, 1, 1, 2, 3]))
    sets = [f"--set={each}={value or draw.choice(VALUES)}" for each in keys]
    forms = (["memory"], ["train", "--dry-run"], ["layout", "--ranks-per-node=4"])
    ranks = [f"--ranks={draw.choice(NUMBERS)}"] if not key and draw.random() < 0.2 else []
    return [*draw.choice(forms), "run.toml", *sets, *ranks], {}


def of_run_text(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """A run file whose text is damaged."""
    return [draw.choice(["memory", "layout"]), "text.toml"], {"text.toml": _damaged(draw, RUN)}


def of_machine(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """A machine file with one number, or its text, changed."""
    name = draw.choice(["frontier", "lumi-g", "dgx-h100"])
    text = (machines.FOLDER / f"{name}.toml").read_text()
    table = draw.choice(sorted(RANGES))
    key, value = draw.choice(sorted(RANGES[table])), draw.choice(VALUES)
    changed = re.sub(rf"(?m)^{key} = .*$", lambda _: f"{key} = {value}", text)
    text = changed if draw.random() < 0.8 else _damaged(draw, text)
    plan = ["plan", "--machine=machine.toml", f"--model={GPT}", "--global-batch=64"]
    forms = (
        [*plan, "--devices=8"],
        [*plan, "--layout=tp=2,pp=2,dp=2"],
        ["train", "--dry-run", "run.toml", "--set=run.machine=machine.toml"],
        ["layout", "run.toml", "--set=run.machine=machine.toml"],
    )
    return draw.choice(forms), {"machine.toml": text}


def of_plan(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """Options of plan."""
    keys = ["layers", "hidden", "heads", "ffn", "vocab", "sequence", "kv_heads", "window", "max_sequence"]
    key, value = draw.choice(keys), draw.choice(VALUES)
    pairs = dict(pair.split("=") for pair in GPT.split(",")) | ({key: value} if draw.random() < 0.5 else {})
    model = ",".join(f"{name}={text}" for name, text in pairs.items())
    axes = ["tp", "pp", "dp", "chunks", "micro_batch", "schedule", "recompute", "shard", "order", "gradient_bytes"]
    layout = f"--layout=tp=2,pp=2,dp=2,{draw.choice(axes)}={draw.choice(VALUES)}".replace(
        "tp=2,", "", draw.randint(0, 1)
    )
    sizes = [f"--devices={draw.choice(['8', '64', *NUMBERS])}"] if draw.random() < 0.5 else [layout]
    more = [f"--{draw.choice(['tokens', 'sequence', 'top', 'explain', 'constraints'])}={draw.choice(VALUES)}"]
    batch = f"--global-batch={draw.choice(['64', '64', *NUMBERS])}"
    return ["plan", "--machine=frontier", f"--model={model}", batch, *sizes, *more[: draw.randint(0, 1)]], {}


def of_schedule(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """Options and files of schedule."""
    name = draw.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "--compare", "nothing"])
    sizes = [f"--{key}={draw.choice(['2', '4', *NUMBERS])}" for key in ("stages", "microbatches")]
    more = [f"--{draw.choice(['chunks', 'times', 'bytes'])}={draw.choice([*VALUES, 'F=1,B=nan', '4MiB'])}"]
    text = "schedule 1f1b\nranks 2\nchunks 1\nplacement loop\nmicrobatches 1\nrank 0: F0 B0\nrank 1: F0 B0\n"
    forms = (
        ["schedule", name, *sizes, *more[: draw.randint(0, 1)]],
        ["schedule", "custom", "--file=schedule.txt"],
        ["schedule", "--measured", draw.choice(FILES)],
        ["schedule", "custom", f"--file={draw.choice(FILES)}"],
    )
    return draw.choice(forms), {"schedule.txt": _damaged(draw, text)}


def of_files(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """Files where checkpoints, runs and results are expected."""
    file, other = draw.choice(FILES), draw.choice(FILES)
    forms = (
        ["checkpoint", draw.choice(["inspect", "verify"]), file],
        ["checkpoint", "diff", file, other, f"--tolerance={draw.choice(NUMBERS)}"],
        ["checkpoint", "convert", file, "new", f"--shard-gb={draw.choice(NUMBERS)}"],
        ["checkpoint", draw.choice(["compress", "decompress"]), file, "new.h5"],
        ["checkpoint", "compress", file, "new.h5", f"--level={draw.choice(NUMBERS)}"],
        [
            "generate",
            file,
            "--prompt=x",
            f"--{draw.choice(['tokens', 'top-k', 'seed', 'tp', 'temperature'])}=" + draw.choice(NUMBERS),
        ],
        ["report", file, "--output=page.html"],
        ["memory", file],
        ["plan", "--calibrate", file, other],
        ["train", "--dry-run", "run.toml", f"--set=run.start_from={json.dumps(file)}", "--set=model.vocabulary=0"],
        ["prepare", file, "--output", other, f"--vocabulary={draw.choice(NUMBERS)}"],
        [
            "prepare",
            "run.toml",
            "--output=store.h5",
            f"--{draw.choice(['seed', 'validation-fraction', 'field'])}=" + draw.choice(VALUES),
        ],
        ["init", file] if file in ("run.toml", "loop", "x" * 300) else ["keys", draw.choice(VALUES)],
        [draw.choice(["keys", "presets", "machines", "codecs", "completion"]), draw.choice(VALUES)],
        [
            "perf",
            *draw.choice(
                [["allreduce", "--sizes=1K"], ["plot"], ["codec", "--sizes=1K", "--codecs=raw"]]
            ),  # valid ones measure
            f"--{draw.choice(['sizes', 'json', 'codecs'])}=" + draw.choice(["junk!", "none/x", "-1", "9" * 99]),
        ],
    )
    return draw.choice(forms), {}


def of_log(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """A run folder whose log holds values of every type under known keys."""
    values: list[Any] = [0, -1, 1e308, 10**400, None, True, "\x1b[2J", "x" * 300, [], [1], {}, {"mesh": 3}, [[]]]
    values += [float("nan"), float("inf"), {"slurm": 3}, {"time": []}, {"mesh": {"dp": "a"}}]
    values += [{"mesh": {"dp": 10**9, "pp": 2, "tp": 10**9}}]

    def record(step: int) -> str:
        kind: dict[str, Any] = draw.choice(RECORDS)
        more = {draw.choice(LOGGED): draw.choice(values) for _ in range(draw.randint(0, 3))}
        return json.dumps({"step": step} | kind | more)

    lines = [record(step) for step in range(draw.randint(1, 6))]
    text = "\n".join(lines)
    return ["report", "run", "--output=page.html"], {
        "run/log.jsonl": text if draw.random() < 0.8 else _damaged(draw, text),
        "run/run.toml": _damaged(draw, RUN),
    }


def of_chats(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """Rows of chats, damaged or not, under our templates and under those of a tokenizer."""
    lines = [json.dumps(draw.choice(CHATS)) for _ in range(draw.randint(1, 8))]
    name = f"chats{draw.choice(['.jsonl', '.jsonl', '.json', '.csv'])}"
    text = f"[{','.join(lines)}]" if name.endswith(".json") else "\n".join(lines)
    files = {name: text if draw.random() < 0.7 else _damaged(draw, text)}
    words = ["prepare", "--chat", name, "--output=chats.h5", "--vocabulary=300"]
    if draw.random() < 0.5:
        return [*words, f"--template={draw.choice(['chatml', 'llama3', 'mistral', 'plain', *NUMBERS[:3]])}"], files
    template = draw.choice(JINJA)
    if draw.random() < 0.2:
        template = _damaged(draw, template)
    config = json.dumps({"chat_template": template, "eos_token": draw.choice(["<|end_of_text|>", {}, 5, "\x1b"])})
    files["model/tokenizer_config.json"] = config if draw.random() < 0.8 else _damaged(draw, config)
    return [*words, "--tokenizer=model", "--template=tokenizer"], files


@cache
def _bytes_tokenizer() -> str:
    """Return a tokenizer whose tokens are the bytes and the end of text."""
    return tokenizer.train(["abc"], tokenizer.SMALLEST_VOCABULARY)


KINDS: dict[str, Callable[[random.Random], tuple[list[str], dict[str, str]]]] = {
    "run file": of_run_file,
    "run text": of_run_text,
    "machine": of_machine,
    "plan": of_plan,
    "schedule": of_schedule,
    "files": of_files,
    "log": of_log,
    "chats": of_chats,
}


def _damaged(draw: random.Random, text: str) -> str:
    """Change a few places of a text: words replaced, lines repeated, cut, bytes of any kind."""
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text) + 1)
        end = min(len(text), place + draw.choice([0, 1, 5, 40]))
        text = text[:place] + draw.choice([*VALUES, "\x00", "\x1b[2J", "\n[", "\r", "=", '"', "é"]) + text[end:]
    return text if draw.random() < 0.9 else text[: draw.randrange(len(text) + 1)]


def fault(code: int | str | None, output: str, errors: str) -> str:
    """Say what is wrong with an answer; empty if nothing is."""
    if code not in (0, 1, 2, 75):
        return f"exit code {code}"
    if "Traceback (most recent call last)" in errors:
        return "traceback"
    if found := STEERS.search(output + errors):
        return f"control character {found[0]!r}"
    mistakes = [line for line in errors.splitlines() if line.startswith("hpcllm: error: ")]
    if code == 2 and len(mistakes) != 1:
        return f"{len(mistakes)} lines of error"
    return ""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
