"""Examples: tokens of context and continuation meet as in their text, files are read or named by line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ENCODER

from hpcllm.data import tokenizer as bpe
from hpcllm.errors import DataError
from hpcllm.evaluation.benchmarks import FORMATS, RejectedError
from hpcllm.evaluation.example_files import read_examples
from hpcllm.evaluation.example_tokens import requests_of, requests_of_pairs
from hpcllm.evaluation.examples import Example

WORDS = bpe.Encoder(bpe.train(["the sum of the ranks is the sum "] * 50, 300))
texts = st.text("the sum of ranks", max_size=30)


@given(texts, texts.filter(str.strip))
@settings(max_examples=200)
def test_tokens_of_context_and_continuation_are_those_of_the_text(context, continuation):
    whole = WORDS.encode([context + continuation])[0].tolist()[:-1]
    try:
        (request,) = requests_of_pairs([(context, continuation)], WORDS, WORDS.vocabulary)
    except DataError:  # the context alone has as many tokens: they grow together
        assert len(whole) <= len(WORDS.encode([context.rstrip()])[0]) - 1
        return
    kept = context.rstrip()
    assert WORDS.decode(np.array(request.context)).decode() in (kept, "")
    assert list(request.continuation) == whole[len(WORDS.encode([kept])[0]) - 1 :]
    if not kept:
        assert request.context == (WORDS.end_of_text,)


def test_choices_of_an_example_follow_one_another_and_a_context_may_be_one_a_choice():
    examples = [Example(("ab",), ("c", "d")), Example(("a", "b"), ("x", "x"), 1, delimiter="")]
    found = requests_of(examples, ENCODER, ENCODER.vocabulary)
    letters = [[bytes(ENCODER.decode(np.array(part))) for part in request] for request in found]
    assert letters == [[b"ab", b" c"], [b"ab", b" d"], [b"a", b"x"], [b"b", b"x"]]


def test_a_token_that_the_model_does_not_have_is_rejected():
    with pytest.raises(DataError, match="the model has 3 tokens"):
        requests_of([Example(("ab",), ("c",))], ENCODER, 3)


GOOD = {"context": "a", "choices": ["b", "c"], "answer": 1}
BAD = {
    "no context": ({"choices": ["b"], "answer": 0}, "context is missing"),
    "context of another type": (GOOD | {"context": 3}, "context is of type int"),
    "no answer": ({"context": "a"}, "answer is missing"),
    "answer out of range": (GOOD | {"answer": 2}, "choice 2; valid: 0 to 1"),
    "answer below": (GOOD | {"answer": -1}, "choice -1"),
    "answer true": (GOOD | {"answer": True}, "answer is of type bool"),
    "empty choice": (GOOD | {"choices": ["b", ""]}, "a choice is empty"),
    "choices of another type": (GOOD | {"choices": "bc"}, "choices is of type str"),
    "choice of another type": (GOOD | {"choices": ["b", None]}, "choices is missing"),
    "contexts": (GOOD | {"context": ["a", "b", "c"]}, "3 contexts for 2 choices"),
    "many choices": (GOOD | {"choices": ["b"] * 101}, "101 choices; valid: 1 to 100"),
    "surrogate": (GOOD | {"context": "\ud800"}, "context is not Unicode"),
    "no object": ([1], "not a JSON object"),
    "group": (GOOD | {"group": 5}, "group is of type int"),
}


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_bad_row_is_named_by_its_line(tmp_path, wrong, suffix):
    row, said = BAD[wrong]
    lines = [json.dumps(GOOD), "", json.dumps(GOOD), json.dumps(row), json.dumps(GOOD)]
    path = tmp_path / f"a file{suffix}"
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    with pytest.raises(DataError) as error:
        read_examples(path, "own", FORMATS)
    assert f"a file{suffix} line 4" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "no examples"), (b"\n\n", "no examples"), (b'{"context":', "line 1"), (b"\xff\xfe\n", "UTF-8"),
     (b"[" * 100_000, "line 1"), (b'{"context": "' + b"a" * (5 << 20) + b'"}', "larger than 4 MiB")],
)  # fmt: skip
def test_damaged_and_hostile_files_are_rejected(tmp_path, content, said):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_examples(path, "own", FORMATS)


@pytest.mark.parametrize("name", ["missing.jsonl", "a.txt", "."])
def test_what_is_no_file_of_rows_is_rejected(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError):
        read_examples(tmp_path / name, "own", FORMATS)


ROWS = {
    "arc": (
        {"question": "Why?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
        Example(("Question: Why?\nAnswer:",), ("x", "y"), 1),
    ),
    "blimp": ({"sentence_good": "He is.", "sentence_bad": "He are."}, Example(("",), ("He is.", "He are."))),
    "boolq": (
        {"passage": "P.", "question": "is it", "answer": True},
        Example(("P.\nQuestion: is it?\nAnswer:",), ("no", "yes"), 1),
    ),
    "hellaswag": (
        {"activity_label": "Cooking", "ctx_a": "A man [step] stirs.", "ctx_b": "he", "endings": ["eats [title] it.",
         "runs."], "label": "1"},
        Example(("Cooking: A man stirs. He",), ("eats. it.", "runs."), 1),
    ),
    "lambada": ({"text": "it was the end"}, Example(("it was the",), ("end",))),
    "mmlu": (
        {"question": " Q? ", "choices": ["p", "q", "r", "s"], "answer": 2, "subject": "maths"},
        Example(("Q?\nA. p\nB. q\nC. r\nD. s\nAnswer:",), ("A", "B", "C", "D"), 2, "maths"),
    ),
    "openbookqa": (
        {"question": {"stem": "A stem", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]},
         "answerKey": "A"},
        Example(("A stem",), ("x", "y"), 0),
    ),
    "piqa": (
        {"goal": "Cook", "sol1": "heat", "sol2": "cool", "label": 0},
        Example(("Question: Cook\nAnswer:",), ("heat", "cool"), 0),
    ),
    "sciq": (
        {"support": " S.", "question": "Q?", "correct_answer": "r", "distractor1": "a", "distractor2": "b",
         "distractor3": "c"},
        Example(("S.\nQuestion: Q?\nAnswer:",), ("a", "b", "c", "r"), 3),
    ),
    "winogrande": (
        {"sentence": "Ann saw Bo because _ looked.", "option1": "Ann", "option2": "Bo", "answer": "1"},
        Example(("Ann saw Bo because Ann", "Ann saw Bo because Bo"), ("looked.", "looked."), 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_benchmarks_are_worded_as_lm_eval_words_them(tmp_path, name):
    row, wanted = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_examples(path, name, FORMATS) == [wanted]


@pytest.mark.parametrize("name", FORMATS)
@given(st.dictionaries(st.sampled_from([c for f in FORMATS.values() for c in f.columns]), st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.lists(st.text(max_size=3), max_size=5),
    st.dictionaries(st.sampled_from(["text", "label", "stem", "choices"]), st.lists(st.text(max_size=2))),
)))  # fmt: skip
@settings(max_examples=60)
def test_any_row_makes_an_example_or_is_rejected(name, row):
    try:
        example = FORMATS[name].read(row)
    except RejectedError:
        return
    assert 0 <= example.answer < len(example.choices)
    assert len(example.pairs()) == len(example.choices)


def test_published_tables_of_mmlu_have_no_names(tmp_path):
    path = tmp_path / "algebra.csv"
    path.write_text('"What, if ""x""?",p,q,r,s,D\nOther?,1,2,3,4,A\n')
    first, second = read_examples(path, "mmlu", FORMATS)
    assert first == Example(('What, if "x"?\nA. p\nB. q\nC. r\nD. s\nAnswer:',), tuple("ABCD"), 3, "algebra")
    assert second.answer == 0
    path.write_text("What?,p,q,r,s,D\nOther?,1,2,3,4\n")
    with pytest.raises(DataError, match=r"row 2: 5 columns"):
        read_examples(path, "mmlu", FORMATS)


def test_parquet_is_read_as_hubs_store_it(tmp_path: Path):
    row, wanted = ROWS["arc"]
    table = pytest.importorskip("pyarrow").Table.from_pylist([row] * 3)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "test.parquet")
    assert read_examples(tmp_path / "test.parquet", "arc", FORMATS) == [wanted] * 3
