"""The tokenizer loses nothing, counts its bytes, and refuses what would."""

from __future__ import annotations

import json
import os
import random
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcllm.data import tokenizer as bpe
from hpcllm.errors import DataError

TEXTS = [f"some words {i % 7} and naïve Ünïcode {i}\n" for i in range(200)]
ENCODER = bpe.Encoder(bpe.train(TEXTS, 350))


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("<|end_of_text|>")
@example("a<|end_of_text|>b <|end_of_text|>")
@example("")
def test_any_text_comes_back_and_its_bytes_add_up(text):
    (ids,) = ENCODER.encode([text])
    assert ids[-1] == ENCODER.end_of_text
    assert ENCODER.end_of_text not in ids[:-1]
    assert ENCODER.decode(ids) == text.encode()
    assert int(ENCODER.token_bytes[ids].sum()) == len(text.encode())


@pytest.mark.parametrize("text", ["x\n" + "é" * 2**20, "word\n" * 220_000])
def test_long_text_in_pieces_comes_back(text):
    assert ENCODER.decode(ENCODER.encode([text])[0]) == text.encode()


def test_training_gives_the_same_bits_in_any_order():
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    assert bpe.train(shuffled, 350) == ENCODER.tokenizer_json == bpe.train(TEXTS, 350)


@pytest.mark.parametrize("vocabulary", [257, 300])
def test_the_vocabulary_is_at_most_what_was_requested(vocabulary):
    assert bpe.Encoder(bpe.train(TEXTS, vocabulary)).vocabulary == vocabulary
    assert bpe.Encoder(bpe.train([], vocabulary)).vocabulary == 257


def test_a_tokenizer_without_end_of_text_gets_one(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=plain.pre_tokenizer.alphabet())
    )
    plain.enable_truncation(5)
    plain.enable_padding(length=100)
    plain.save(str(tmp_path / "plain.json"))
    encoder = bpe.Encoder(bpe.load(tmp_path / "plain.json"))
    assert encoder.vocabulary == plain.get_vocab_size() + 1
    assert encoder.end_of_text == plain.get_vocab_size()
    assert encoder.decode(encoder.encode(TEXTS)[0]) == TEXTS[0].encode()


@pytest.mark.parametrize("kind", ["prefix space", "words", "metaspace", "lower case"])
def test_what_is_not_lossless_is_rejected(tmp_path, kind):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = {
        "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "words": pre_tokenizers.Whitespace(),
        "metaspace": pre_tokenizers.Metaspace(),
        "lower case": pre_tokenizers.ByteLevel(add_prefix_space=False),
    }[kind]
    if kind == "lower case":
        made.normalizer = normalizers.Lowercase()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=bpe_alphabet()))
    made.save(str(tmp_path / "made.json"))
    with pytest.raises(DataError, match="not byte-level"):
        bpe.load(tmp_path / "made.json")


def test_an_ordinary_token_is_no_end_of_text(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.train_from_iterator(["</s>"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=bpe_alphabet()))
    assert plain.token_to_id("</s>") is not None
    plain.save(str(tmp_path / "plain.json"))
    encoder = bpe.Encoder(bpe.load(tmp_path / "plain.json"))
    (ids,) = encoder.encode(["</s>"])
    assert ids.tolist() == [plain.token_to_id("</s>"), encoder.end_of_text]
    assert encoder.decode(ids) == b"</s>"


def bpe_alphabet():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def test_tokens_of_llama_2_stand_for_their_bytes():
    """A vocabulary of text with marks for spaces, and of single bytes for what is in no token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("a", "b"), ("\u2581", "ab")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    encoder = bpe.Encoder(tokenizer.to_str())
    for text in ("ab ab  b", "a\n\U0001f680 b", "</s>"):
        (ids,) = encoder.encode([text])
        assert encoder.decode(ids).decode() == f" {text}" == tokenizer.decode(ids[:-1].tolist(), False)
        assert int(encoder.token_bytes[ids].sum()) == len(f" {text}".encode())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_rejected(text):
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        bpe.Encoder(text)


ORDINARY = st.lists(st.sampled_from([*"ab1 \n-_é中", " ", "word ", "x" * 200, "-" * 250, "7" * 255]), max_size=30)
LONG = st.lists(st.sampled_from([" ", "\n", "a" * 300, "-" * 257, "_-" * 400, "12" * 500, " " * 513]), max_size=12)


@given((ORDINARY | LONG).map("".join))
@settings(deadline=None)
@example("a" * bpe.LONGEST_WORD)
@example("-" + "a" * (bpe.LONGEST_WORD + 1) + "-")
def test_words_are_cut_where_they_are_too_long_and_nowhere_else(text):
    pieces = bpe.cut_long_words(text)
    assert "".join(pieces) == text
    words = [len(word) for word in re.findall(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+", text)]
    assert len(pieces) - 1 == sum((length - 1) // bpe.LONGEST_WORD for length in words)


def test_training_is_not_quadratic_in_the_longest_word():
    """Once 59 s on one line of 250,000 letters."""
    start_s = time.monotonic()
    trained = bpe.train([*TEXTS, "x" * 250_000], 350)
    assert time.monotonic() - start_s < 10
    assert bpe.long_words([*TEXTS, "x" * 250_000]) == 976
    assert bpe.Encoder(trained).decode(bpe.Encoder(trained).encode(["x" * 250_000])[0]) == b"x" * 250_000


def hostile(**more):
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []} | more.pop("model", {})
    return json.dumps({"version": "1.0", "model": model, "added_tokens": []} | more)


@pytest.mark.parametrize(
    "text",
    [
        hostile(model={"vocab": {"a": 2**32 - 1}}),
        hostile(model={"merges": [["a", "b"]] * 3}),
        "[" * 200_000,
        '{"a":' * 200_000,
        "\x00" * 1000,
    ],
)
def test_hostile_tokenizers_are_refused_in_words(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"tokenizer"):
        bpe.load(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="the tokenizer"):
        bpe.Encoder(text)


def test_a_tokenizer_is_a_regular_file_of_bounded_size(tmp_path):
    with open(tmp_path / "sparse.json", "wb") as file:
        file.truncate(2**40)
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "sparse.json", tmp_path / "pipe.json", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            bpe.load(path)
