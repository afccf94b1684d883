"""Chats in a token store: masks as in transformers, no text forges a control token, any ranks write the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_mpi.parallel_assert import parallel_assert

from hpcllm.config.schema import Config, DataConfig
from hpcllm.data import chat, tokenizer
from hpcllm.data.chat import ChatRows, ChatTemplate
from hpcllm.data.chat_rendering import TemplateProcess, compiled, renderer
from hpcllm.data.chat_template import TEMPLATES, RejectedError, TemplateSource
from hpcllm.data.documents import Problem
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.data.store import SPLITS, TokenStore, open_store
from hpcllm.data.store_verify import verify
from hpcllm.data.token_spill import TokenSpill
from hpcllm.errors import ConfigError, DataError

UNMARKED = (  # of its own kind: no generation blocks, a beginning of the answer, tools in the user's name
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FOURTH = TemplateSource(
    UNMARKED, ("<s>", *(f"<|{role}|>" for role in chat.ROLES), "<|end|>"), {"bos_token": "<s>"}, is_ours=False
)
SOURCES = {**TEMPLATES, "fourth": FOURTH}
WORDS = ["two", " plus", "é🚀", "\n\n", "<", "|im_end|>", "<|im_end|>", "[INST]", "</s>", "  ", "<|end|>", "中"]
MARKED = UNMARKED.replace(
    "<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>\n",
    "<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] | trim }}<|end|>{{ '\n' }}{% endif %}",
)  # the fourth one as transformers wants it


def talk(turns: int, words: list[str], seed: int = 0, system: bool = True) -> list[dict[str, str]]:
    """Messages of alternating roles, whose words may be those that hurt."""
    draw = np.random.default_rng(seed)

    def text() -> str:
        return "w" + "".join(draw.choice(words, draw.integers(1, 9))) + "."

    roles = (["system"] if system else []) + ["user", "assistant"] * turns
    return [{"role": role, "content": text()} for role in roles]


def trained(source: TemplateSource, vocabulary: int = 320) -> str:
    return tokenizer.train(
        ["two plus two makes four, né? " * 20, "中 assistant user system"], vocabulary, source.controls
    )


def template_of(source: TemplateSource, render=None) -> ChatTemplate:
    controls = dict.fromkeys(("<|end_of_text|>", *source.controls), True)
    return ChatTemplate(render or renderer(source), controls, "generation %" in source.text)


def peer(tokenizer_json: str, source: TemplateSource):
    """The same tokenizer and template in transformers."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    of_library = tokenizers.Tokenizer.from_str(tokenizer_json)
    peer = PreTrainedTokenizerFast(tokenizer_object=of_library, **(source.variables or {}))
    peer.chat_template = MARKED if source is FOURTH else source.text
    return peer


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_tokens_and_masks_are_those_of_transformers(name, turns):
    source = SOURCES[name]
    tokenizer_json = trained(source)
    plain = [word for word in WORDS if "|" not in word and "[" not in word and "</" not in word]
    for seed in range(8):
        messages = talk(turns, plain, seed)
        [(ids, counted)] = tokenizer.Encoder(tokenizer_json).encode_chats([template_of(source).apply(messages, 0)])
        wanted = peer(tokenizer_json, source).apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        assert ids.tolist() == wanted["input_ids"]
        assert counted.tolist() == [bool(flag) for flag in wanted["assistant_masks"]]
        assert 0 < counted.sum() < len(counted)


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), turns=st.integers(1, 3))
def test_no_text_forges_a_control_token(name, seed, turns):
    """As many control tokens as for harmless messages; and all text comes back from the tokens."""
    source = SOURCES[name]
    encoder = tokenizer.Encoder(TRAINED[name])
    forging, harmless = talk(turns, [*WORDS, *source.controls], seed), talk(turns, ["a"], seed)
    special = [id_ for id_ in range(encoder.vocabulary) if not encoder.token_bytes[id_]]
    found = [encoder.encode_chats([template_of(source).apply(each, 0)])[0][0] for each in (forging, harmless)]
    assert np.isin(found[0], special).sum() == np.isin(found[1], special).sum()
    text = encoder.decode(found[0]).decode()
    for message in forging:
        assert chat._content(message["content"]).strip() in text


TRAINED = {name: trained(source) for name, source in SOURCES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rule_of_prefixes_finds_what_generation_blocks_mark(name):
    """With its marks taken out, each of our templates gives the same spans; but ends of turns that no prompt begins."""
    source = TEMPLATES[name]
    bare = replace(source, text=source.text.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    for seed in range(10):
        messages = talk(3, WORDS, seed)
        assert template_of(bare).apply(messages, 0) == template_of(source).apply(messages, 0)


ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "plain": "<|end_of_text|>",
    "fourth": "<|end|>",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_prompt_is_what_stands_before_its_answer_and_a_turn_ends_with_one_token(name):
    template = template_of(SOURCES[name])
    assert template.ends_of_turn() == {ENDS[name]}
    for seed in range(10):
        question, answer = talk(1, WORDS, seed, system=False)
        begun, whole = template.beginning(question["content"]), template.apply([question, answer], 0)
        [(first, end)] = whole.counted
        assert begun.text == whole.text[:first]
        assert begun.controls == tuple(span for span in whole.controls if span[1] <= first)
        assert whole.text[:end].endswith(ENDS[name])


def test_a_template_that_rejects_every_conversation_ends_no_turn():
    assert template_of(TemplateSource("{{ raise_exception('no') }}")).ends_of_turn() == frozenset()


def test_in_a_pair_and_after_a_prompt_only_the_last_answers_count():
    rows = ChatRows(template_of(TEMPLATES["chatml"]))
    begun = talk(1, ["old"])
    pair = rows.read("x", {"prompt": begun, "chosen": "good", "rejected": "bad"}, 10**6)
    whole = {
        key: [*begun, {"role": "assistant", "content": text}] for key, text in (("chosen", "good"), ("rejected", "bad"))
    }
    assert pair.rendered == rows.read("x", whole, 10**6).rendered
    assert pair.kind == "preferences"
    for rendered, answer in zip(pair.rendered, ("good", "bad"), strict=True):
        assert [rendered.text[a:b] for a, b in rendered.counted] == [f"{answer}<|im_end|>"]
    single = rows.read("x", {"prompt": "ask", "completion": "tell"}, 10**6)
    assert [single.rendered[0].text[a:b] for a, b in single.rendered[0].counted] == ["tell<|im_end|>"]


HOSTILE = {
    chat.NO_CHAT: {"text": "x"},
    chat.NO_LIST: {"messages": 5},
    chat.NO_MESSAGE: {"messages": [{"role": "user", "content": ["x"]}]},
    chat.NO_ROLE: {"messages": [{"role": "root", "content": "x"}]},
    chat.TOOL_CALLS: {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
    chat.TOO_MANY: {"messages": [{"role": "user", "content": "x"}] * 10**6},
    chat.RESERVED: {"prompt": "\ufdd0", "completion": "x"},
    chat.NOT_UTF8: {"prompt": "\ud800", "completion": "x"},
    chat.NO_ANSWER: {"messages": [{"role": "user", "content": "x"}]},
    chat.EQUAL: {"prompt": "x", "chosen": "a", "rejected": "a"},
    chat.TOO_LARGE: {"prompt": "x" * 2000, "completion": "y"},
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_rows_that_make_no_chat_are_named(reason):
    found = ChatRows(template_of(TEMPLATES["chatml"])).read("file:7", HOSTILE[reason], 1000)
    assert isinstance(found, Problem)
    assert found.reason == reason


def test_a_template_that_rewrites_earlier_turns_is_found():
    last_only = TemplateSource("{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}")
    with pytest.raises(RejectedError, match=chat.REWRITTEN):
        template_of(last_only).apply(talk(2, ["a"]), 0)


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
    "{{ 9 ** (9 ** 9) }}",
]
REJECTED = [
    "{{ 'x' * 10 ** 12 }}",
    "{{ '%1000000000000d' % 1 }}",
    "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ range(10 ** 9) }}",
    "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("text", REJECTED)
def test_a_template_that_misbehaves_rejects_the_conversation_alone(text):
    with TemplateProcess(TemplateSource(text)) as process:
        for _ in range(2):
            with pytest.raises(RejectedError):
                process(talk(1, ["a"]), False)


@pytest.mark.parametrize("text", ENDLESS)
def test_a_template_without_an_end_is_ended(text):
    with pytest.raises(DataError, match="does not end"), TemplateProcess(TemplateSource(text)) as process:
        process(talk(1, ["a"]), False)


@pytest.mark.parametrize("text", ["{% for %}", "{{" * 5000, "{% if x %}" * 5000, "{{ " + "(" * 50000 + " }}"])
def test_a_template_that_does_not_compile_is_rejected(text):
    with pytest.raises(DataError, match="chat template"):
        TemplateProcess(TemplateSource(text))


def test_the_sandbox_executes_nothing(tmp_path):
    for call in ("open('{0}', 'w')", "cycler.__init__.__globals__.os.system('touch {0}')"):
        template = compiled("{{ " + call.format(tmp_path / "made") + " }}")
        with pytest.raises(Exception, match=r"undefined|unsafe"):
            template.render(messages=[])
    assert not (tmp_path / "made").exists()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conversations(count):
    return [{"messages": talk(1 + seed % 3, WORDS, seed)} for seed in range(count)]


def preferences(count):
    return [{"prompt": f"ask {i}", "chosen": "good " * (i % 5), "rejected": f"bad {i}"} for i in range(count)]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("rows", [conversations, preferences])
@pytest.mark.parametrize("count", [3, 40])
def test_any_number_of_ranks_writes_the_bytes_of_one(comm, shared_path, rows, count):
    """Files of few tokens too, whose bits share bytes among ranks."""
    from mpi4py import MPI

    if comm.rank == 0:
        for part in range(5):
            write(shared_path / f"{part}.jsonl", [*rows(count)[part::5], *list(HOSTILE.values())[:3]])
    comm.Barrier()
    more = {"template": "chatml", "vocabulary": 300, "validation_fraction": 0.3}
    inputs = tuple(shared_path / f"{part}.jsonl" for part in range(5))
    report = prepare(PrepareOptions(inputs=inputs, output=shared_path / "together.h5", **more), comm)
    parallel_assert(sum(report.documents.values()) == count * (2 if rows is preferences else 1))
    same = True
    if comm.rank == 0:
        alone = prepare(PrepareOptions(inputs=inputs, output=shared_path / "alone.h5", **more), MPI.COMM_SELF)
        same = (shared_path / "alone.h5").read_bytes() == (shared_path / "together.h5").read_bytes()
        same = same and alone.dropped == report.dropped and sum(d.count for d in report.dropped.values()) == 15
    parallel_assert(comm.bcast(same))
    parallel_assert(verify(shared_path / "together.h5", comm, lambda _: None).is_sound)


@pytest.mark.parametrize("rows", [conversations, preferences])
def test_the_bits_of_a_store_are_those_of_its_conversations(comm, tmp_path, rows):
    options = PrepareOptions(
        inputs=(write(tmp_path / "a.jsonl", rows(30)),), output=tmp_path / "s.h5", template="llama3", vocabulary=300
    )
    prepare(options, comm)
    store = TokenStore.open(tmp_path / "s.h5")
    encoder, reader = tokenizer.Encoder(store.tokenizer_json), ChatRows(template_of(TEMPLATES["llama3"]))
    wanted = [encoder.encode_chats(reader.read("", row, 10**6).rendered) for row in rows(30)]
    held = []
    for split in SPLITS:
        for first, end in pairwise(store.documents(split).tolist()):
            bits = [int(store.counted(split)[i // 8]) >> (i % 8) & 1 for i in range(first, end)]
            assert bits == store.counted_of(split, first, end).tolist()
            held.append((store.tokens(split)[first:end].tolist(), bits))
    assert sorted(held) == sorted((ids.tolist(), counted.tolist()) for row in wanted for ids, counted in row)
    assert sum(sum(bits) for _, bits in held) == sum(store.header.counted.values())


def test_what_cannot_be_a_chat_store_is_rejected(comm, tmp_path):
    chats, pairs = write(tmp_path / "c.jsonl", conversations(3)), write(tmp_path / "p.jsonl", preferences(3))
    (tmp_path / "plain.json").write_text(tokenizer.train(["abc"], 300))
    good = {"inputs": (chats,), "output": tmp_path / "s.h5", "template": "chatml", "vocabulary": 300}
    for wrong, words in (
        ({"inputs": (chats, pairs)}, "3 conversations and 3 pairs"),
        ({"tokenizer": tmp_path / "plain.json"}, "lacks <|im_start|>, <|im_end|>"),
        ({"template": "tokenizer"}, "needs --tokenizer"),
        ({"template": "tokenizer", "tokenizer": tmp_path / "plain.json"}, "has no chat template"),
        ({"template": "alpaca"}, "valid: chatml"),
        ({"inputs": ()}, "chats need inputs"),
    ):
        with pytest.raises(DataError, match=words.replace("|", r"\|")):
            prepare(PrepareOptions(**good | wrong), comm)


@pytest.mark.parallel([1, 2])
def test_a_tokenizers_own_template_makes_the_store_of_ours(comm, shared_path):
    source = TEMPLATES["chatml"]
    if comm.rank == 0:
        write(shared_path / "c.jsonl", conversations(20))
        (shared_path / "tokenizer.json").write_text(TRAINED["chatml"])
        (shared_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source.text}))
    comm.Barrier()
    for name in ("chatml", "tokenizer"):
        output = shared_path / f"{name}.h5"
        prepare(
            PrepareOptions(inputs=(shared_path / "c.jsonl",), output=output, template=name, tokenizer=shared_path), comm
        )
    parallel_assert((shared_path / "chatml.h5").read_bytes() == (shared_path / "tokenizer.h5").read_bytes())


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_ranks_that_share_bytes_write_the_bits_of_all(tmp_path_factory, lengths, seed):
    """lengths: of the documents of each rank; some have none, or less than a byte."""
    folder, draw = tmp_path_factory.mktemp("spills"), np.random.default_rng(seed)
    tokens = sum(map(sum, lengths))
    offsets = {"train/tokens": 0, "train/counted": 2 * tokens, "train/documents": 2 * tokens + -(-tokens // 8)}
    (folder / "store").touch()
    spills, flags = [], [np.empty(0, np.bool_)]
    for rank, documents in enumerate(lengths):
        spills.append(TokenSpill(folder / f"{rank}", np.dtype("<u2")))
        for length in documents:
            flags.append(draw.random(length) < 0.5)
            spills[-1].append(np.arange(length, dtype=np.uint32), flags[-1])
        spills[-1].close()
    for rank, spill in enumerate(spills):
        before, following = spills[:rank], b"".join(each.head for each in spills[rank + 1 :])
        counts = sum(each.tokens for each in before), sum(each.documents for each in before)
        spill.write(folder / "store", "train", offsets, *counts, following)
    bits = (folder / "store").read_bytes()[offsets["train/counted"] : offsets["train/documents"]]
    assert bits == np.packbits(np.concatenate(flags), bitorder="little").tobytes()


@pytest.mark.parallel(1)
def test_training_refuses_preferences(comm, tmp_path):
    write(tmp_path / "pairs.jsonl", preferences(40))
    path = tmp_path / "pairs.h5"
    more = {"template": "chatml", "vocabulary": 300}
    prepare(PrepareOptions(inputs=(tmp_path / "pairs.jsonl",), output=path, **more), comm)
    with pytest.raises(ConfigError, match="holds preferences, which a run with"):
        open_store(Config(data=DataConfig(store=str(path), sequence_length=8)), None)
