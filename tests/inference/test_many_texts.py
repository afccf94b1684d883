"""Many prompts by the command: in order, each as it would be alone, on any layout, and none lost on an interrupt."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from hpcllm.cli.main import main
from hpcllm.config.schema import MeshConfig
from hpcllm.errors import DataError
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Completion, Place, TextSettings, complete, continue_prompt
from hpcllm.inference.prompt_files import completion_lines, read_prompts
from hpcllm.model.sampling import Sampling
from hpcllm.mpi.mesh import open_mesh
from tests.inference.test_generate import CYCLE, cycling_model, random_model, shared_model  # noqa: F401

PROMPTS = ["a", "the second, which is longer", "é🚀", 'with "quotes" and\ttabs', "a" * 40, "b", "a"]
SETTINGS = TextSettings(Sampling(1.2, 20), BatchSettings(tokens=9, texts=3), seed=5, samples=2)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parallel([1, 2, 3, 4])
def test_every_layout_completes_all_prompts_alike(comm, shared_model):  # noqa: F811
    want = sorted(complete(shared_model, PROMPTS, SETTINGS, Place()), key=lambda each: (each.prompt, each.sample))
    assert [(each.prompt, each.sample) for each in want] == [(p, s) for p in range(len(PROMPTS)) for s in (0, 1)]
    assert len({each.text for each in want}) > len(PROMPTS)  # samples differ, and so do equal prompts
    for dp, pp, tp in {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1)], 3: [(3, 1, 1)], 4: [(2, 1, 2), (2, 2, 1)]}[comm.size]:
        with open_mesh(comm, MeshConfig(dp=dp, pp=pp, tp=tp)) as mesh:
            found = complete(shared_model, PROMPTS, SETTINGS, Place(mesh=mesh))
            assert sorted(found, key=lambda each: (each.prompt, each.sample)) == want, (dp, pp, tp)


@pytest.mark.parallel([1, 2, 3])
def test_the_command_writes_lines_in_order(comm, shared_model, shared_path, capfd):  # noqa: F811
    file, out = shared_path / "my prompts.jsonl", shared_path / "my texts.jsonl"
    if comm.rank == 0:
        file.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n" for prompt in PROMPTS))
    comm.Barrier()
    words = ["generate", str(shared_model), "--prompts", str(file), "--tokens", "9", "--samples", "2"]
    words += ["--dp", str(comm.size), "--seed", "5", "--temperature", "1.2", "--top-k", "20"]
    assert main(words) == 0
    got = rows(capfd.readouterr().out)
    if comm.rank == 0:
        want = sorted(complete(shared_model, PROMPTS, SETTINGS, Place()), key=lambda each: (each.prompt, each.sample))
        assert [(row["index"], row["sample"], row["prompt"]) for row in got] == [
            (number, sample, prompt) for number, prompt in enumerate(PROMPTS) for sample in (0, 1)
        ]
        assert [(row["text"], row["tokens"], row["reason"]) for row in got] == [
            (each.text, each.tokens, each.reason) for each in want
        ]
    comm.Barrier()
    assert main([*words, "--output", str(out), "--unordered", "--json", "--price-per-hour", "36"]) == 0
    report = capfd.readouterr().out
    if comm.rank == 0:
        assert sorted(rows(out.read_text()), key=lambda row: (row["index"], row["sample"])) == got
        assert json.loads(report)["texts"] == len(got)
        found = json.loads(report)
        assert found["tokens"] == sum(row["tokens"] for row in got)
        assert found["price_per_million_tokens"] * found["tokens_per_s"] == pytest.approx(36 / 3600 * 1e6)
    else:
        assert (got, report) == ([], "")


@pytest.mark.full(reason="several starts of PyTorch; a sixth of a minute", in_ci=True)
def test_one_prompt_and_the_first_of_many_say_the_same(random_model):  # noqa: F811
    """Also with a stop string, which the text as it is made holds back until it is one or not."""
    for stops in ((), ("e",), ("zz", "a"), ("\n", "é")):
        settings = TextSettings(Sampling(1.5, 0), BatchSettings(tokens=60), seed=3, stops=stops)
        for prompt in PROMPTS:
            (one,) = complete(random_model, [prompt], settings, Place())
            assert "".join(continue_prompt(random_model, prompt, settings, Place())) == one.text
            assert not any(stop in one.text for stop in stops)


@pytest.mark.parametrize("stop", ["中", "中a", "🚀中", "a", CYCLE, "aé🚀"])
def test_a_stop_string_ends_a_text_wherever_its_tokens_are_cut(cycling_model, stop):  # noqa: F811
    """Each byte is a token, so every stop string lies across several."""
    endless = CYCLE[CYCLE.index("a") + 1 :] + CYCLE * 5
    settings = TextSettings(Sampling(0.0), BatchSettings(tokens=40), stops=("no such", stop))
    (one,) = complete(cycling_model, ["a"], settings, Place())
    assert (one.text, one.reason) == (endless[: endless.index(stop)], "stop")
    assert one.tokens == len(endless[: endless.index(stop) + len(stop)].encode())
    made = list(continue_prompt(cycling_model, "a", settings, Place()))
    assert "".join(made) == one.text


@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_that_has_ended_is_lost_when_the_work_is_interrupted(ordered):
    file, ends = io.StringIO(), [3, 0, 5, 1, 4]  # 2 is still being made

    def interrupted() -> None:
        with completion_lines(file, list("abcdef"), 1, ordered) as write:
            for number in ends:
                write(Completion(number, 0, "text", 1, "length"))
            assert len(rows(file.getvalue())) == (2 if ordered else 5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    found = [row["index"] for row in rows(file.getvalue())]
    assert found == ([0, 1, 3, 4, 5] if ordered else ends)


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.txt", "one\n\n two \r\nthree", ["one", " two ", "three"]),
        ("a.jsonl", '{"prompt": "x\\ny"}\n\n{"prompt": "", "n": [1]}\n', ["x\ny", ""]),
        ("-", '{"prompt": "x"}\n', ["x"]),
        ("-", "é {\n", ["é {"]),
        ("a.txt", '{"prompt": "x"}\n', ['{"prompt": "x"}']),
    ],
)
def test_prompts_come_from_lines_or_json(tmp_path, monkeypatch, name, content, want):
    assert read_prompts(source(tmp_path, monkeypatch, name, content.encode())) == want


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"\xff\n", "no prompts can be read from .*: not UTF-8: byte 0xff at 0; valid: a text file"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": 3}\n', "line 2 of .*a.jsonl.* has no prompt"),
        ("a.jsonl", b'{"prompt": "x"\n', "line 1 of .* is no JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 of .* is no JSON"),
        ("-", b'{"promt": "x"}\n', "line 1 of standard input has no prompt"),
    ],
)
def test_what_holds_no_prompts_is_said_with_its_line(tmp_path, monkeypatch, name, content, said):
    path = source(tmp_path, monkeypatch, name, content)
    with pytest.raises(DataError, match=said):
        read_prompts(path)


def source(folder: Path, monkeypatch, name: str, content: bytes) -> Path:
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return Path("-")
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", "x", "--prompts", "-"], "not allowed with argument"),
        (["--prompt", "x", "--dp", "2"], "for many texts"),
        (["--prompt", "x", "--output", "y"], "for many texts"),
        (["--prompt", "x", "--price-per-hour", "0"], "for many texts"),
        (["--prompts", "-", "--json"], "would both go to standard output"),
        (["--prompts", "no such", "--output", "no folder/x"], "cannot write"),
        (["--prompts", "no such"], "no prompts can be read"),
        (["--prompt", "x", "--top-p", "0"], "--top-p"),
        (["--prompt", "x", "--stop", ""], "stop string is empty"),
        (["--prompt", "x", "--tokens", "2000000", "--cache-mib", "1"], None),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(random_model, capsys, flags, said):  # noqa: F811
    code = main(["generate", str(random_model), *flags])
    if said is None:
        assert code == 0  # the window bounds what a text needs
    else:
        assert code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
