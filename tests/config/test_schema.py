"""A run file means what it says, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.config import schema as config
from hpcllm.config.policies import POLICIES
from hpcllm.config.rules import RANGES, RULES, divisors
from hpcllm.config.schema import Config, ModelConfig, from_tables, parse, to_tables
from hpcllm.errors import ConfigError
from hpcllm.pipeline.schedules import SCHEDULES

KEYS = {f"{title}.{f.name}": f for title, kind in config.sections().items() for f in config.plain_keys(kind)}
NUMBERS = [key for key, f in KEYS.items() if f.type in ("int", "float")]
FLOATS = [key for key in NUMBERS if KEYS[key].type == "float"]

words = st.text("abcXYZ äß字🚀_-", min_size=1, max_size=8)
positive = st.floats(1e-9, 1e6)
fractions = st.floats(0, 0.999)


@st.composite
def models(draw) -> dict:
    kv_heads, group, half = (draw(st.integers(1, 4)) for _ in range(3))
    heads = kv_heads * group
    return {
        "preset": draw(st.sampled_from(config.preset_names())),
        "layers": draw(st.integers(1, 9)),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([0, kv_heads])),
        "hidden": heads * 2 * half,
        "max_sequence": draw(st.integers(64, 4096)),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "swiglu"])),
        "tied": draw(st.booleans()),
        "rope_theta": draw(st.floats(1.5, 1e6)),
        "rope_fraction": draw(st.sampled_from([1.0] if half % 2 else [1.0, 0.5])),
        "biases": draw(st.sampled_from(["none", "all", "qkv"])),
    }


@st.composite
def valid_tables(draw) -> dict:
    """Some keys of some tables, each with a valid value; the others are left out."""
    model = draw(models())
    full = {
        "run": {"name": draw(words), "seed": draw(st.integers(0, 2**63 - 1)), "steps": draw(st.integers(1, 10**9))},
        "data": {"store": draw(words), "sequence_length": draw(st.integers(1, 64)), "global_batch": 7},
        "mesh": {
            "dp": draw(st.integers(0, 99)),
            "pp": draw(st.integers(1, model["layers"])),
            "tp": draw(st.integers(1, 9)),
            "order": ",".join(draw(st.permutations(["dp", "pp", "tp"]))),
            "sequence_parallel": draw(st.booleans()),
        },
        "pipeline": {
            "schedule": draw(st.sampled_from(list(SCHEDULES))),
            "microbatches": draw(st.integers(1, 99)),
            "chunks": draw(st.integers(0, 9)),
            "recompute": draw(st.sampled_from(["none", "full", "selective,full"])),
            "layers": draw(st.sampled_from([[], [model["layers"]], [1] * model["layers"]])),
        },
        "optimizer": {
            "learning_rate": draw(positive),
            "beta1": draw(fractions),
            "final_fraction": draw(fractions),
            "shard": draw(st.sampled_from(["none", "states", "states+gradients", "all"])),
        },
        "precision": {
            "compute": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
            "loss_scale": draw(st.floats(1, 1e9)),
        },
        "communication": {
            "gradients": draw(st.sampled_from(["", "raw", "int8:64:sr", "zfp:12", "int4:128+ef"])),
            "policy": draw(st.sampled_from(list(POLICIES))),
            "bucket_mib": draw(positive),
        },
        "checkpoint": {"every_steps": draw(st.integers(0, 99)), "keep": draw(st.integers(1, 9))},
        "log": {
            "every_steps": draw(st.integers(1, 99)),
            "trackers": draw(st.sampled_from([[], ["wandb"], ["mlflow", "tensorboard"]])),
        },
        "limits": {"stall_s": draw(positive)},
    }
    some = {name: {k: v for k, v in table.items() if draw(st.booleans())} for name, table in full.items()}
    if full["mesh"]["pp"] > 1 and some["optimizer"].get("shard") == "all":
        del some["optimizer"]["shard"]
    return {"model": model, "data": {"sequence_length": 64}} | some | {"mesh": full["mesh"], "data": full["data"]}


@settings(deadline=None, max_examples=60)
@given(valid_tables())
def test_tables_and_toml_text_come_back_as_the_same_config(tables):
    once = from_tables(tables)
    assert from_tables(to_tables(once)) == once
    assert parse(tomli_w.dumps(to_tables(once))) == once
    for name, table in tables.items():
        for key, value in table.items():
            found = getattr(getattr(once, name), key)
            assert (list(found) if isinstance(found, tuple) else found) == value


@settings(deadline=None, max_examples=60)
@given(valid_tables())
def test_overrides_mean_what_the_same_keys_in_the_file_mean(tables):
    overrides = [
        f"{name}.{tomli_w.dumps({key: value}).replace(' = ', '=', 1).strip()}"
        for name, table in tables.items()
        for key, value in table.items()
    ]
    assert parse("", overrides) == from_tables(tables)


def test_every_default_keeps_its_own_rule():
    for key, f in KEYS.items():
        if key in RULES:
            assert RULES[key][1](f.default), key
    assert from_tables(to_tables(Config())) == Config()


def test_every_rule_is_about_a_key_and_every_number_has_a_rule():
    assert set(RULES) <= set(KEYS)
    assert set(NUMBERS) <= set(RULES)


BELOW_ONE = math.nextafter(1, 0)
EDGES = {  # key -> the last values that are valid, the first that are not
    "optimizer.beta1": ([0.0, BELOW_ONE], [-1e-9, 1.0]),
    "optimizer.beta2": ([0.0, BELOW_ONE], [-1e-9, 1.0]),
    "optimizer.final_fraction": ([0.0, 1.0], [-1e-9, 1 + 1e-9]),
    "model.rope_fraction": ([1.0], [0.0, 1 + 1e-9]),
    "run.seed": ([0, 2**63 - 1], [-1, 2**63]),
}
for key, valid in RANGES.items():
    least, most = (float(end) if key in FLOATS else end for end in (valid.least, valid.most))
    below, above = math.nextafter(least, -1), math.nextafter(most, math.inf)
    if key not in FLOATS:
        below, above = least - 1, most + 1
    EDGES[key] = ([most], [least, above]) if valid.above else ([least, most], [below, above])


@pytest.mark.parametrize("key", NUMBERS)
def test_the_last_valid_value_passes_and_the_next_one_is_rejected(key):
    valid, passes = RULES[key]
    last, first = EDGES[key]
    assert all(map(passes, last))
    assert not any(map(passes, first))
    for value in first if key in FLOATS else map(int, first):
        with pytest.raises(ConfigError, match=re.escape(f"{key} = {value!r} is out of range; valid: {valid}")):
            parse("", [f"{key}={value!r}"])


@pytest.mark.parametrize("name", config.preset_names())
def test_presets_load_and_are_the_shape_that_a_run_file_gets(name):
    model = from_tables({"model": {"preset": name}}).model
    assert dataclasses.asdict(model) == dataclasses.asdict(ModelConfig()) | config.preset(name) | {"preset": name}


def test_a_key_in_the_file_wins_over_the_preset_and_set_wins_over_both():
    text = '[model]\npreset = "gpt2-124m"\nlayers = 3\n'
    assert parse(text).model.layers == 3
    assert parse(text, ["model.layers=5", "model.layers=6"]).model.layers == 6
    assert parse(text).model.hidden == parse("", ["model.preset=gpt2-124m"]).model.hidden == 768


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.name=first", "run.name", "first"),
        ("run.name='with space'", "run.name", "with space"),
        ("run.name=with space", "run.name", "with space"),
        (' run.name ="2024"', "run.name", "2024"),
        ("run.name=2024", "run.name", "2024"),
        ("data.store=true", "data.store", "true"),
        ("data.store=/a folder/b=c.h5", "data.store", "/a folder/b=c.h5"),
        ("mesh.dp=4", "mesh.dp", 4),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ('log.trackers=["wandb"]', "log.trackers", ("wandb",)),
        ("pipeline.layers=[1, 3]", "pipeline.layers", (1, 3)),
        ("pipeline.layers=[]", "pipeline.layers", ()),
    ],
)
def test_words_of_the_command_line(override, key, value):
    table, name = key.split(".")
    found = getattr(getattr(parse("", [override]), table), name)
    assert (found, type(found)) == (value, type(value))


def grpo(**reward):
    """Tables of a run that learns from rewards; a model that is known, so that all is checked at once."""
    reward = {"prompts": "copy", **reward}
    return {
        "run": {"start_from": "x"},
        "model": {"layers": 2},
        "finetuning": {"kind": "grpo", "reward": reward},
    }


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"modle": {}}, ["unknown table [modle]", "did you mean model?", "valid: "]),
        ({"qqq": {}}, ["unknown table [qqq]", "valid: checkpoint, communication"]),
        (
            {"mesh": {"ordr": 2}},
            ["unknown key mesh.ordr", "did you mean mesh.order?", "dp, order, pp, sequence_parallel, tp"],
        ),
        ({"mesh": 3}, ["mesh = 3", "table"]),
        ({"model": {"preset": "gpt2-124"}}, ["model.preset = 'gpt2-124'", "did you mean gpt2-124m?"]),
        ({"model": {"preset": 3}}, ["model.preset = 3", "a string"]),
        ({"run": {"steps": "10"}}, ["run.steps = '10'", "a whole number"]),
        ({"run": {"steps": 10.0}}, ["run.steps = 10.0", "a whole number"]),
        ({"run": {"steps": True}}, ["run.steps = True", "a whole number"]),
        ({"optimizer": {"epsilon": True}}, ["optimizer.epsilon = True", "a number"]),
        ({"run": {"name": 1}}, ["run.name = 1", "a string"]),
        ({"log": {"trackers": "wandb"}}, ["log.trackers = 'wandb'", '["tensorboard"]']),
        ({"log": {"trackers": ["wand"]}}, ["log.trackers = ['wand']", "tensorboard, wandb, mlflow"]),
        ({"checkpoint": {"asynchronous": 1}}, ["checkpoint.asynchronous = 1", "true or false"]),
        ({"model": {"norm": "batchnorm"}}, ["model.norm = 'batchnorm'", "'layernorm', 'rmsnorm'"]),
        ({"model": {"norm": ["rmsnorm"]}}, ["model.norm = ['rmsnorm']", "'layernorm'"]),
        ({"run": {"name": "a/b"}}, ["run.name = 'a/b'", "without '/'"]),
        ({"run": {"name": ""}}, ["run.name = ''"]),
        ({"run": {"name": ".."}}, ["run.name = '..'"]),
        ({"mesh": {"tp": 0}}, ["mesh.tp = 0", "1 to 2^20"]),
        ({"mesh": {"order": "dp,pp"}}, ["mesh.order = 'dp,pp'", "tp, dp and pp"]),
        ({"model": {"hidden": 100, "heads": 3}}, ["hidden = 100", "heads = 3", "1, 2, 4, 5, 10, 20, 25"]),
        ({"model": {"hidden": 12, "heads": 6, "kv_heads": 4}}, ["kv_heads = 4", "heads = 6", "1, 2, 3, 6"]),
        (
            {"model": {"hidden": 9, "heads": 3, "kv_heads": 0, "positions": "rotary"}},
            ["head's 3 channels", "is 3", "even"],
        ),
        (
            {"model": {"max_sequence": 256}, "data": {"sequence_length": 257}},
            ["sequence_length = 257", "max_sequence = 256"],
        ),
        ({"pipeline": {"schedule": "2f2b"}}, ["schedule = '2f2b'", "'gpipe', '1f1b', "]),
        ({"pipeline": {"schedule": "custom"}}, ["schedule = 'custom'", "file = ''", "valid: 'custom' with"]),
        ({"pipeline": {"file": "my.txt"}}, ["schedule = '1f1b'", "file = 'my.txt'", "without one"]),
        ({"pipeline": {"layers": 4}}, ["layers = 4", "list of whole numbers", "[5, 6, 6, 5]"]),
        ({"pipeline": {"layers": [2, "2"]}}, ["layers = [2, '2']", "list of whole numbers"]),
        ({"pipeline": {"layers": [2, True]}}, ["layers = [2, True]", "list of whole numbers"]),
        ({"pipeline": {"layers": [4, 0]}}, ["layers = [4, 0]", "1 to 1024 blocks"]),
        ({"model": {"layers": 4}, "pipeline": {"layers": [2, 3]}}, ["[2, 3] adds up to 5", "model.layers = 4", "[]"]),
        ({"communication": {"algorithm": "native", "gradients": "bf16"}}, ["algorithm = 'native'", "'bf16'", "'raw'"]),
        ({"communication": {"algorithm": "node_window", "policy": "zhybrid"}}, ["'node_window'", "'zfp:8'", "'auto'"]),
        ({"log": {"trace_steps": [3, 0]}}, ["log.trace_steps = [3, 0]", "from 1 to 1e9"]),
        ({"run": {"steps": 9}, "log": {"trace_steps": [9, 10]}}, ["trace_steps has 10", "run.steps = 9", "1 to that"]),
        ({"communication": {"gradients": "int9"}}, ["gradients = 'int9'", "int8:256"]),
        ({"communication": {"forward": "int8:100"}}, ["forward = 'int8:100'", "int8:32 to int8:4096"]),
        ({"communication": {"backward": "int8+ef"}}, ["backward = 'int8+ef'", "'int8:256'"]),
        ({"communication": {"gradients": "exp+ef"}}, ["gradients = 'exp+ef'", "'exp'"]),
        ({"communication": {"forward": "int4:64:sr"}}, ["forward = 'int4:64:sr'", "'int4:64'"]),
        ({"communication": {"parameters": "int8+ef"}}, ["parameters = 'int8+ef'", "'int8:256'"]),
        ({"communication": {"tensor": "int4:64:sr"}}, ["tensor = 'int4:64:sr'", "'int4:64'"]),
        ({"model": {"hidden": 12, "heads": 3, "rope_fraction": 0.8}}, ["rope_fraction = 0.8", "4 channels", "even"]),
        ({"model": {"hidden": 12, "heads": 3, "rope_fraction": 0.2}}, ["rope_fraction = 0.2", "is 0", "not 0"]),
        ({"model": {"hidden": 12, "heads": 3, "rope_fraction": 1.5}}, ["rope_fraction = 1.5", "<= 1"]),
        ({"model": {"rope_scaling": "yarn"}}, ["rope_scaling = 'yarn'", "'linear', 'llama3'"]),
        ({"model": {"rope_scaling": "llama3", "rope_low_frequency": 4.0}}, ["rope_low_frequency = 4.0", "1 and 4"]),
        ({"pipeline": {"recompute": "full,some"}}, ["recompute = 'full,some'", "none, selective or full"]),
        ({"optimizer": {"shard": "zero"}}, ["shard = 'zero'", "'states+gradients'"]),
        ({"precision": {"compute": "fp8"}}, ["compute = 'fp8'", "'bf16'"]),
        ({"optimizer": {"shard": "all"}, "mesh": {"pp": 2}}, ["shard = 'all'", "mesh.pp = 2", "pp = 1", "'states'"]),
        (
            {"optimizer": {"shard": "states"}, "communication": {"algorithm": "two_level"}},
            ["algorithm = 'two_level'", "shard = 'states'", "auto, ring"],
        ),
        ({"finetuning": {"kind": "sft"}}, ["finetuning.kind = 'sft'", "'supervised', 'dpo'"]),
        ({"finetuning": {"adapter": 3}}, ["finetuning.adapter = 3", "[finetuning.adapter]"]),
        ({"finetuning": {"adapter": {"rnk": 3}}}, ["unknown key finetuning.adapter.rnk", "rank"]),
        ({"finetuning": {"adapter": {"rank": 3}}}, ["adapter.rank = 3", "kind = 'none'", "'supervised', 'dpo' or"]),
        ({"finetuning": {"adapter": {"alpha": 3}}}, ["adapter.alpha = 3.0", "rank = 0", "alpha = 16.0"]),
        ({"finetuning": {"adapter": {"base": "int4"}}}, ["adapter.base = 'int4'", "rank = 0", "base = 'compute'"]),
        ({"finetuning": {"adapter": {"targets": ["up"]}}}, ["adapter.targets = ('up',)", "rank = 0"]),
        ({"finetuning": {"adapter": {"targets": ["head"]}}}, ["adapter.targets", "query, key, value"]),
        ({"finetuning": {"kind": "supervised", "beta": 0.5}}, ["beta = 0.5", "'supervised'", "kind = 'dpo'"]),
        ({"finetuning": {"reward": {"kl": 1}}}, ["reward.kl = 1.0", "kind = 'none'", "kind = 'grpo'"]),
        ({"finetuning": {"kind": "grpo", "reward": {"prompts": "copy"}}}, ["needs run.start_from"]),
        (grpo(prompts=""), ["finetuning.reward.prompts is missing", "'sort:4'"]),
        (grpo(samples=7), ["global_batch = 32", "samples = 7", "a multiple of it"]),
        (grpo(samples=1), ["finetuning.reward.samples = 1", "2 to 2^16"]),
        (grpo(tokens=300), ["reward.tokens = 300", "sequence_length = 256"]),
        (grpo(function="a b"), ["finetuning.reward.function = 'a b'", "a name as Python has them"]),
        (grpo() | {"optimizer": {"shard": "all"}}, ["shard = 'all'", "kind = 'grpo'", "'states+gradients'"]),
    ],
)
def test_a_wrong_file_is_refused_with_key_value_and_what_is_valid(tables, said):
    with pytest.raises(ConfigError) as refused:
        from_tables(tables)
    assert refused.value.exit_code == 2
    assert [part for part in said if part not in str(refused.value)] == []


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused_everywhere(key, value):
    with pytest.raises(ConfigError, match=rf"{key} = {value} should be a finite number"):
        parse("", [f"{key}={value}"])


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_out_of_range_are_refused(key):
    with pytest.raises(ConfigError, match=rf"{key} = -2(\.0)? is out of range; valid: "):
        parse("", [f"{key}=-2"])


@pytest.mark.parametrize("key", [key for key, (valid, _) in RULES.items() if valid.startswith("a path ")])
@pytest.mark.parametrize(
    ("longest", "wrong"), [("x" * 255, "x" * 256), ("é" * 127, "é" * 128), ("x/" * 2047, "x/" * 2048)]
)
def test_a_path_that_no_file_has_is_refused_by_its_key(key, longest, wrong):
    assert RULES[key][1](longest)
    for path in (wrong, "\\u0000", f"{longest[:-1]}\\u0000"):
        with pytest.raises(ConfigError, match=rf"{key} = .*; valid: a path without NUL"):
            parse("", [f'{key}="{path}"'])


@pytest.mark.parametrize("override", ["mesh.dp", "mesh=4", "=4", "dp=4", "mesh.=4", ""])
def test_an_override_that_is_none_is_refused_with_an_example(override):
    with pytest.raises(ConfigError, match=r"should read table\.key=value, for example mesh\.dp=4"):
        parse("", [override])


@pytest.mark.parametrize("content", [b"[run\n", b"a = \n", b"\xff\xfe", None])
def test_a_file_that_is_no_run_file_is_named(tmp_path, content):
    path = tmp_path / "my run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="my run"):
        config.load(path)


@settings(deadline=None)
@given(st.text("[]=.\"'#\n abz19-{},", max_size=40), st.lists(st.text("run.steps=[\"'1\n", max_size=20), max_size=2))
def test_no_text_does_anything_but_load_or_be_refused(text, overrides):
    with contextlib.suppress(ConfigError):
        parse(text, overrides)


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_divisors_are_those_that_leave_nothing_a_dozen_at_most(n):
    want = [d for d in range(1, n + 1) if math.gcd(d, n) == d]
    found = divisors(n).split(", ")
    assert found == [str(d) for d in want[:12]] + (["..."] if len(want) > 12 else [])


def test_a_number_too_large_to_be_meant_is_refused_at_once():
    for text in ("1" + "0" * 400, "9" * 5000):
        with pytest.raises(ConfigError):
            parse(f"[optimizer]\nlearning_rate = {text}\n")
    assert divisors(10**18)


def test_a_key_that_means_nothing_any_more_bars_no_run_file_or_checkpoint_of_before():
    before = to_tables(from_tables({}))
    before["energy"]["sysfs"] = "/sys"
    assert to_tables(from_tables(before)) == to_tables(from_tables({}))
    with pytest.raises(ConfigError, match=r"energy.*sysf"):
        from_tables({"energy": {"sysf": "/sys"}})
