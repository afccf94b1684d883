"""Shots: others than the question itself, of its group, the same for a seed, and never of what is measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ENCODER, checkpoint_of

from hpcllm.cli.main import main
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import DataError
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.problems import part_of
from hpcllm.evaluation.questions import Question
from hpcllm.evaluation.settings import Options
from hpcllm.evaluation.shots import Drawing, with_shots
from hpcllm.evaluation.tasks import examples_of, parse_task, questions_of

MODEL = ModelConfig(layers=2, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=96)
rows = st.lists(
    st.builds(
        lambda prompt, answer, group: Question(f"<{prompt}>", (f"[{answer}]",), group=group),
        st.integers(0, 9), st.integers(0, 3), st.sampled_from(["", "a", "b"]),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@given(rows, st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=200)
def test_shots_are_others_of_the_group_each_row_at_most_once(questions, count, seed):
    drawing = Drawing(questions, "a file")
    for question in questions:
        others = [each for each in questions if each.group == question.group and each.prompt != question.prompt]
        if len(others) < count:
            with pytest.raises(DataError, match=f"a file has {len(others)} examples to show"):
                drawing.draw(question, count, str(seed))
            continue
        shots = drawing.draw(question, count, str(seed))
        assert len(shots) == count
        assert shots == drawing.draw(question, count, str(seed))
        for shot in shots:
            others.remove(shot)  # raises where it is none, or comes too often
        shown = with_shots(question, shots)
        assert shown == replace(question, prompt="".join(f"{each.shown}\n\n" for each in shots) + question.prompt)


@given(rows, st.integers(0, 99))
def test_rows_without_the_group_of_the_question_are_all_there_to_draw_from(questions, seed):
    stranger = Question("what?", ("that",), group="of nobody")
    assert sorted(map(repr, Drawing(questions, "").draw(stranger, len(questions), str(seed)))) == sorted(
        map(repr, questions)
    )


def test_shots_of_choices_show_the_right_one_before_each_beginning():
    shots = [Example(("Ann", "Bob"), ("is", "was"), 1), Example(("2 +",), ("2\n",), delimiter=" ")]
    found = with_shots(Example(("a", "b"), ("c", "d")), shots)
    assert found.contexts == ("Bob was\n\n2 + 2\na", "Bob was\n\n2 + 2\nb")


def test_draws_depend_on_seed_and_number_alone(tmp_path):
    path = tmp_path / "a file.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
    task = parse_task(f"generate={path}")
    whole = questions_of(task, Options(shots=3, seed=1))
    assert questions_of(task, Options(shots=3, seed=1, limit=7)) == whole[:7]
    assert len({question.prompt.partition("?")[0] for question in whole}) > 5
    assert [each.prompt for each in whole] != [each.prompt for each in questions_of(task, Options(shots=3, seed=2))]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": f"x{i}"}) + "\n" for i in range(40)))
    for number, question in enumerate(questions_of(task, Options(shots=2, shots_from=other))):
        assert question.prompt.count("x") == 2
        assert question.prompt.endswith(f"\n\n{number}?")
        assert f"{number}? x{number}\n" not in question.prompt[: -len(f"{number}?")].replace(f"1{number}?", "")


@pytest.mark.parametrize("text", ["sort:3", "generate=sort:3"])
def test_shots_of_problems_are_of_the_part_that_is_never_measured(text):
    task = parse_task(text)
    made = questions_of if task.generates else examples_of
    for each in made(task, Options(problems=30, shots=4)):
        *shots, asked = (each.prompt if task.generates else each.contexts[0]).split("\n")
        assert [part_of(shot.partition("=")[0] + "=") for shot in shots] == ["train"] * 4
        assert part_of(asked) == "held-out"


def test_the_command_shows_examples_and_says_where_there_are_too_few(tmp_path, capfd):
    path = checkpoint_of(tmp_path, MODEL)
    for name, count in (("rows.jsonl", 5), ("more rows.jsonl", 9)):
        lines = [json.dumps({"context": f"{i} is", "choices": ["odd", "even"], "answer": i % 2}) for i in range(count)]
        (tmp_path / name).write_text("\n".join(lines))
    file, more = str(tmp_path / "rows.jsonl"), str(tmp_path / "more rows.jsonl")

    def losses(*words) -> float:
        assert main(["evaluate", str(path), "--task", file, "--json", *words]) == 0
        return json.loads(capfd.readouterr().out)["tasks"][0]["figures"]["loss"]["value"]

    found = [losses(), losses("--shots", "2"), losses("--shots", "2", "--shots-from", more)]
    assert len(set(found)) == 3
    assert losses("--shots", "0") == found[0]
    wrong = {
        ("--shots", "5"): "rows.jsonl has 4 examples to show in front of another; valid: up to 4 shots",
        ("--shots-from", more): "with --shots 0 and 1 files of examples",
        ("--shots", "1", "--shots-from", more, "--task", more): "with --shots 1 and 2 files",
        ("--shots", "1", "--shots-from", str(tmp_path / "gone.jsonl")): "gone.jsonl",
        ("--shots", "101"): "valid: a whole number",
    }
    for words, said in wrong.items():
        assert main(["evaluate", str(path), "--task", file, *words]) == 2
        assert said in " ".join(capfd.readouterr().err.split())
