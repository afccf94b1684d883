r"""Questions that a model answers by writing: what counts as right, which rows make one, patterns that cannot hang."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import DataError
from hpcllm.evaluation import patterns
from hpcllm.evaluation.benchmarks import RejectedError
from hpcllm.evaluation.example_files import read_examples
from hpcllm.evaluation.patterns import Search, search_all
from hpcllm.evaluation.question_formats import GSM8K, QUESTIONS
from hpcllm.evaluation.questions import COMPARISONS, Question, plain

ROWS = {
    "generate": (
        {"prompt": "2 + 2 =", "answer": ["4", "four"], "stop": ["\n\n", "Q:"], "pattern": "[a-z0-9]+",
         "compare": "words", "group": "sums"},
        ("2 + 2 =", ("4", "four"), ("\n\n", "Q:"), "words", "sums", "2 + 2 = 4"),
    ),
    "gsm8k": (
        {"question": "How many?", "answer": "3 times 400 is 1200.\n#### 1,200"},
        ("Question: How many?\nAnswer:", ("1,200",), ("Question:", "</s>", "<|im_end|>"), "number", "",
         "Question: How many?\nAnswer: 3 times 400 is 1200.\n#### 1,200"),
    ),
    "nq_open": (
        {"question": "who sang it", "answer": ["The Band", "Band"]},
        ("Q: who sang it?\nA:", ("The Band", "Band"), ("\n", ".", ","), "words", "", "Q: who sang it?\nA: The Band"),
    ),
    "triviaqa": (
        {"question": "Who?", "answer": {"aliases": ["Ann", "Anna"], "value": "Ann"}},
        ("Question: Who??\nAnswer:", ("Ann", "Anna"), ("\n", ".", ","), "words", "", "Question: Who??\nAnswer: Ann"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_worded_as_lm_eval_words_them(tmp_path, name):
    row, wanted = ROWS[name]
    path = tmp_path / "a file.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_examples(path, name, QUESTIONS)
    assert (found.prompt, found.answers, found.stops, found.compare, found.group, found.shown) == wanted


def test_a_row_that_says_no_more_ends_at_the_line_and_compares_all_of_it():
    assert QUESTIONS["generate"].read({"prompt": "a", "answer": "b"}) == Question("a", ("b",))


GOOD = {"prompt": "a", "answer": "b"}
BAD = {
    "no prompt": ({"answer": "b"}, "prompt is missing"),
    "no answer": ({"prompt": "a"}, "answer is missing"),
    "no answers": (GOOD | {"answer": []}, "0 answers; valid: 1 to"),
    "a number": (GOOD | {"answer": 4}, "answer is of type int"),
    "an empty answer": (GOOD | {"answer": ["b", " "]}, "an answer is empty"),
    "an empty stop": (GOOD | {"stop": ["\n", ""]}, "stop has an empty text"),
    "stops": (GOOD | {"stop": ["a"] * 17}, "more than 16"),
    "a stop of another type": (GOOD | {"stop": 3}, "stop is of type int"),
    "a pattern": (GOOD | {"pattern": "("}, "pattern: it is no regular expression"),
    "a long pattern": (GOOD | {"pattern": "a" * 1001}, "1,001 characters; valid: up to 1,000"),
    "a large repetition": (GOOD | {"pattern": "a{99999999999}"}, "pattern: it is no regular expression"),
    "compare": (GOOD | {"compare": "letters"}, "compare is none of text, number, words"),
    "no object": ([1], "not a JSON object"),
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_bad_row_is_named_by_its_line(tmp_path, wrong):
    row, said = BAD[wrong]
    path = tmp_path / "a file.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (GOOD, GOOD, row, GOOD)))
    with pytest.raises(DataError) as error:
        read_examples(path, "generate", QUESTIONS)
    assert "a file.jsonl line 3" in str(error.value)
    assert said in str(error.value)


def test_an_answer_of_gsm8k_without_its_mark_is_rejected():
    with pytest.raises(RejectedError, match="no number behind"):
        QUESTIONS["gsm8k"].read({"question": "a", "answer": "12"})


@pytest.mark.parametrize("name", QUESTIONS)
@given(st.dictionaries(st.sampled_from([c for f in QUESTIONS.values() for c in f.columns]), st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.lists(st.text(max_size=3), max_size=5),
    st.dictionaries(st.just("aliases"), st.lists(st.text(max_size=2))),
)))  # fmt: skip
@settings(max_examples=60)
def test_any_row_makes_a_question_or_is_rejected(name, row):
    try:
        question = QUESTIONS[name].read(row)
    except RejectedError:
        return
    assert all(question.is_right(answer) for answer in question.answers)


@pytest.mark.parametrize(
    ("compare", "one", "other", "same"),
    [
        ("text", " a b\n", "a b", True), ("text", "A", "a", False), ("text", "1,200", "1200", False),
        ("number", "$1,200.", " 1200", True), ("number", "1.5", "15", False), ("number", "1200.0", "1200", False),
        ("words", "The  Beatles!", "beatles", True), ("words", "Theatre", "atre", False),
        ("words", "a an the End", "end", True),
    ],
)  # fmt: skip
def test_what_does_not_count_is_left_aside(compare, one, other, same):
    assert (plain(one, compare) == plain(other, compare)) is same
    assert Question("", (one,), compare=compare).is_right(other) is same
    assert not Question("", (one,), compare=compare).is_right(None)


@given(st.text(max_size=30), st.sampled_from(COMPARISONS))
def test_leaving_aside_ends_without_white_space_around(text, compare):
    found = plain(text, compare)
    assert found == found.strip()


TEXTS = {
    "she has 3 and 400, so\n#### 1,200\nQ #### 7": ("1,200", "7"),
    "it is 12 or $3.50": (None, "$3.50"),
    "nothing": (None, None),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_numbers_of_gsm8k_are_found_first_and_last(text):
    searches = [Search(reading.pattern, text, reading.last) for reading in GSM8K]
    assert tuple(search_all(searches)) == TEXTS[text]


def test_a_pattern_gives_its_first_group_that_is_there_or_all_of_its_match():
    found = search_all([Search("x", "axbx"), Search("(a)|(b)", "ab"), Search("", "all"), Search("a(?=b)", "cd")])
    assert found == ["x", "b", "all", None]


def test_patterns_that_never_end_find_nothing_and_take_a_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr(patterns, "LIMIT_S", 0.1)
    slow = [Search(f"(a+)+$|{i}", "a" * 60 + "b") for i in range(20)]
    started_s = time.monotonic()
    found = search_all([Search("b", "abc"), slow[0], Search("c", "abc"), slow[0], *slow])
    assert time.monotonic() - started_s < 30
    assert found[:3] == ["b", None, "c"]
    assert set(found[3:]) == {None}
    assert len([record for record in caplog.records if "finds nothing" in record.message]) == patterns.MOST_SLOW + 1
