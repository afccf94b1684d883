"""A run file (TOML) <-> frozen dataclasses, checked once at the door.

    run.toml  +  --set key=value  ->  Config  ->  run.toml in the run folder, /run in each checkpoint

Each table of the file is one dataclass below; a field is a key, its default the default of the key, its name carries
the unit; a field that is a dataclass is a table inside the table. Unknown keys, wrong types and impossible values raise
ConfigError with the key, the value and what would be valid. Pure: imports neither torch nor mpi4py, so `--help` and
wrong files answer at once.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcllm.codecs.names import parse_name
from hpcllm.config.input_files import read_text
from hpcllm.config.names import closest, key_meant, nearest
from hpcllm.config.policies import TRAFFIC, codecs_of
from hpcllm.config.rules import LAYERS, checked, divisors, typed
from hpcllm.errors import ConfigError

GROUP = 64  # inputs of a frozen weight of 8 or 4 bits that have one scale
SHARED_OUT = ("ring", "two_step", "node_window", "native")  # algorithms that give each replica its share of a sum
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # precision.compute -> name of the dtype
RETIRED = {"energy.sysfs", "log.tensorboard"}  # keys of files of older versions that decide nothing now: ignored
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = "run"  # the run lives in <folder>/<name>
    folder: str = "runs"  # where run folders lie
    seed: int = 0  # of weights and sample order
    steps: int = 1000  # of the whole run, those before a restart included
    start_from: str = ""  # a Hugging Face folder or a checkpoint whose model the run begins with
    machine: str = ""  # a name from machines/ or a path to such a TOML file; its peak gives MFU
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto: a GPU where PyTorch sees one (CUDA, ROCm, XPU), else the CPU
    deterministic: bool = True  # sums of a device have one order; false: faster attention, other bits in each run
    requeue: bool = False  # a job that ends before run.steps puts itself back into the batch system's queue


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder with the choices of GPT-2, Llama and GPT-NeoX; presets/ has named shapes. The defaults are `tiny`."""

    preset: str = "tiny"  # the shape that the other keys of [model] change; `hpcllm presets` lists them
    layers: int = 4  # transformer blocks
    hidden: int = 128  # channels of the residual stream
    heads: int = 4  # of attention, in each block
    kv_heads: int = 0  # 0: as many as heads; fewer is grouped-query attention
    head_channels: int = 0  # of one head; 0: hidden / heads
    ffn: int = 352  # inner channels of the feed-forward network
    vocabulary: int = 0  # 0: that of the token store
    max_sequence: int = 256  # rows of the learned position table; the longest sequence
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"  # before attention and feed-forward network
    norm_epsilon: float = 1e-5  # added to the variance
    positions: Literal["learned", "rotary"] = "rotary"  # how a token knows its place
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_fraction: float = 1.0  # share of a head's channels that turn; the rest know no position
    rope_scaling: Literal["none", "linear", "llama3"] = "none"  # longer sequences than the weights were trained with
    rope_factor: float = 1.0  # how many times longer a sequence may be, with rope_scaling
    rope_low_frequency: float = 1.0  # llama3: channels of fewer turns over rope_original_sequence are stretched in full
    rope_high_frequency: float = 4.0  # llama3: of more turns, not at all
    rope_original_sequence: int = 8192  # llama3: tokens that the weights were trained with
    window: int = 0  # a token sees the last so many, itself included (sliding window); 0: all before it
    parallel_residual: bool = False  # attention and feed-forward network both read the block's input (GPT-NeoX)
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"  # of the feed-forward network
    tied: bool = True  # the output layer uses the embedding's weight
    biases: Literal["none", "all", "qkv"] = "none"  # of linear layers; qkv: of query, key and value only (Qwen2)
    # not compared: the same model, computed another way
    compile: bool = field(default=False, compare=False)  # blocks by torch.compile; needs a C++ compiler

    @property
    def head_dim(self) -> int:
        return self.head_channels or self.hidden // self.heads

    @property
    def turned_channels(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    store: str = ""  # the file that `prepare` wrote
    sequence_length: int = 256  # tokens a sample
    global_batch: int = 32  # samples a step, over all ranks
    document_mask: bool = True  # documents of a sample do not see each other, and positions begin anew in each
    packing: Literal["stream", "best-fit"] = "stream"  # documents run on over samples, or stay whole where they fit
    validation_sequences: int = 1024  # at most this many held-out samples are scored


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    dp: int = 0  # replicas of the model; 0: all ranks that pp and tp leave
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks that share each layer
    order: str = "tp,dp,pp"  # fastest-varying axis first: neighbours in rank share a node
    sequence_parallel: bool = False  # what lies between the layers that tp splits is split too, along the sequence


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "custom"] = "1f1b"  # order of the passes
    microbatches: int = 1  # pieces that a replica's share of the global batch is cut into
    chunks: int = 0  # virtual stages a rank; 0: as many as the schedule takes by itself
    layers: tuple[int, ...] = ()  # blocks of each virtual stage, in the order of the model; []: divided by cost
    file: str = ""  # the text of a custom schedule
    recompute: str = "none"  # none | selective | full, or one word a virtual stage: "full,full,none,none"
    loss_tokens: int = 0  # logits of so many tokens exist at once, made again in the backward pass; 0: of a microbatch
    offload: bool = False  # what backward passes read waits for them in host memory


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float = 3e-4  # the peak, after warm-up
    warmup_steps: int = 100  # steps in which the learning rate rises from 0 to its peak
    final_fraction: float = 0.1  # of the peak, reached at the last step by a cosine
    weight_decay: float = 0.1  # decoupled; never on norms and biases
    beta1: float = 0.9  # decay of the mean of the gradients
    beta2: float = 0.95  # decay of the mean of their squares
    epsilon: float = 1e-8  # added to the root of the mean of squares
    clip_norm: float = 1.0  # 0: no clipping
    shard: Literal["none", "states", "states+gradients", "all"] = "none"  # what dp replicas hold a share of: ZeRO 0-3
    offload: bool = False  # states and master weights rest in host memory, and come to the device for each update


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Master weights, gradient sums and optimizer states are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"  # of weights, activations and their gradients
    loss_scale: float = 65536.0  # fp16: the first one; halved when a gradient overflows
    loss_scale_steps: int = 1000  # fp16: doubled after so many steps without overflow


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Codecs and algorithms of messages. Names of codecs: hpcllm/codecs; an empty name leaves it to the policy."""

    policy: Literal["none", "mzhybrid", "zhybrid", "hpcllm"] = "none"  # codecs of all kinds of traffic
    gradients: str = ""  # their sum over dp; "int4:128+ef" is int4:128 with error feedback
    parameters: str = ""  # gathered over dp by a sharded optimizer; a lossy codec travels their differences
    forward: str = ""  # activations between stages
    backward: str = ""  # gradients of activations between stages
    tensor: str = ""  # activations and their gradients inside the layers that tp splits
    exact: str = "norm,bias,embedding,positions"  # in a parameter's name: no lossy codec for it
    exact_steps: int = 20  # all traffic is exact in the first steps of a run
    algorithm: Literal[
        "auto", "ring", "two_step", "grid", "recursive_doubling", "rabenseifner", "node_window", "two_level", "native"
    ] = "auto"  # of the gradient sum over dp
    bucket_mib: float = 16.0  # gradients are summed in pieces of about this size, the first and the last ones shorter
    tuning: str = ""  # a file that `python -m hpcllm.perf tune` wrote; auto decides by it
    hash_every_steps: int = 100  # replicas compare a hash of what they hold, before each save too; 0: only then
    gpu_aware: Literal["auto", "yes", "no"] = "auto"  # may MPI read device memory; auto: tried out at the start


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters: a layer's weight is frozen, and alpha / rank times a product of two thin matrices is added."""

    rank: int = 0  # of the product that is added to a weight; 0: no adapters, all weights are trained
    alpha: float = 16.0  # the product is multiplied by alpha / rank
    targets: tuple[str, ...] = LAYERS  # linear layers of each block that have one
    base: Literal["compute", "bf16", "int8", "int4"] = "compute"  # how frozen weights are held; as they compute


@dataclass(frozen=True, kw_only=True)
class FinetuningConfig:
    kind: Literal["none", "supervised", "dpo"] = "none"  # what `hpcllm finetune` learns from: chats, or preferences
    beta: float = 0.1  # dpo: how dear it is to leave the reference, the weights that the run began with
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 500  # 0: only at the end, and when the run is asked to stop or save
    keep: int = 2  # newest files that stay
    keep_every_steps: int = 0  # files of every so many steps stay for ever; 0: none
    keep_best: int = 0  # files of the lowest validation loss that stay
    asynchronous: bool = True  # training goes on while a thread writes, from a copy in the host's memory
    feedback: bool = True  # keep what error feedback owes, 4 bytes a gradient and replica; else it is dropped
    writer: Literal["offsets", "mpio"] = "offsets"  # mpio: by a parallel HDF5, h5py built with MPI
    stripe_count: int = 0  # Lustre: targets that a file is spread over, -1 for all; 0: as the folder says
    stripe_mib: int = 16  # Lustre: size of a stripe, where stripe_count is not 0


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every_steps: int = 10  # steps between two lines of the log
    validation_every_steps: int = 0  # 0: only at the end
    trackers: tuple[str, ...] = ("tensorboard",)  # where numbers go beside log.jsonl: tensorboard, wandb, mlflow
    trace_steps: tuple[int, ...] = ()  # steps of which a trace of the pipeline is written, such as [10, 11]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every_steps: int = 0  # steps between two measurements by the tasks; 0: only at the end
    tasks: tuple[str, ...] = ()  # as --task of `hpcllm evaluate`: ["reverse:5", "more.h5", "arc=test.parquet"]
    shots: int = 0  # examples with their answers in front of each, as --shots
    examples: int = 200  # of each task: so many are made, or taken of a file or of the rows of a store at most


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    stall_s: float = 600.0  # a message that takes longer ends the run, named
    wall_s: float = 0.0  # this start may take so long; 0: until the batch job's time limit, if there is one
    margin_s: float = 0.0  # the run saves and stops so long before that; 0: by the measured time of a step and a write


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    source: Literal["auto", "none", "pm_counters", "nvml", "hwmon", "rapl"] = "auto"  # auto: the first that is there
    price_per_kwh: float = 0.0  # in the currency of your choice; 0: energy has no price
    price_per_node_hour: float = 0.0  # 0: nodes have no price


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    finetuning: FinetuningConfig = field(default_factory=FinetuningConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a run file, lay `key=value` overrides on top, check everything. Raises ConfigError."""
    try:
        text = read_text(path)
    except ValueError as error:
        raise ConfigError(f"cannot read the run file {str(path)!r}: {error}") from error
    return parse(text, overrides, origin=str(path))


def parse(text: str, overrides: typing.Sequence[str] = (), origin: str = "run file") -> Config:
    """TOML text -> Config. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError; so is a number of 5000 digits
        raise ConfigError(f"{origin} is not valid TOML: {error}{_curly_quote(text)}") from error
    for override in overrides:
        _override(tables, override)
    return from_tables(tables)


def _curly_quote(text: str) -> str:
    """Write the fix for a quotation mark that a word processor has made, "" if there is none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.search("[\u2018\u2019\u201c\u201d]", line.partition("#")[0]):
            return f"; line {number} has {found[0]}, write a straight quotation mark"
    return ""


def sections(kind: type = Config, above: str = "") -> dict[str, type]:
    """Map the title of each table, "finetuning.adapter" for one inside another, to its dataclass, in order."""
    found: dict[str, type] = {}
    for title, inner in ((above + f.name, typing.cast(type, f.default_factory)) for f in dataclasses.fields(kind)):
        if dataclasses.is_dataclass(inner):
            found |= {title: inner, **sections(inner, f"{title}.")}
    return found


def plain_keys(kind: type) -> list[dataclasses.Field[Any]]:
    """List the keys of a table that are no tables."""
    return [each for each in dataclasses.fields(kind) if not dataclasses.is_dataclass(each.default_factory)]


def _kind(section: str, key: str) -> Any:
    """The declared type of a key, None if there is no such key."""
    kind = sections().get(section)
    return typing.get_type_hints(kind).get(key) if kind else None


def from_tables(tables: dict[str, Any]) -> Config:
    """Check nested dicts and make a Config of them: names, types, values, then keys together. Raises ConfigError."""
    kinds = {title: kind for title, kind in sections().items() if "." not in title}
    values = {}
    for name, table in {"model": {}, **tables}.items():  # a preset holds even where the table is left out
        if name not in kinds:
            keys = table if isinstance(table, dict) and not closest(name, kinds) else []
            hint = next((found for key in keys or [name] if (found := _meant(f"{name}.{key}" if keys else name))), "")
            raise ConfigError(f"unknown table [{name}]; {hint}{nearest(name, kinds)}")
        values[name] = _section(name, kinds[name], table)
    config = Config(**values)
    if not (config.run.start_from and config.model == ModelConfig()):  # else once the model is known
        check_together(config)
    return config


def to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The inverse of from_tables, every key written out."""
    return dataclasses.asdict(config)


def key_names() -> list[str]:
    """List every key with its table, in the order of the schema."""
    return [f"{title}.{key.name}" for title, kind in sections().items() for key in plain_keys(kind)]


def _meant(word: str) -> str:
    """Write 'did you mean optimizer.learning_rate? ', "" where no key is near."""
    found = key_meant(word, key_names())
    return f"did you mean {found}? " if found else ""


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset(name: str) -> dict[str, Any]:
    """The [model] keys of a named shape. Raises ConfigError."""
    if name.lower() not in preset_names():
        raise ConfigError(f"model.preset = {name!r} is unknown; {nearest(name, preset_names())}")
    return tomllib.loads((PRESETS / f"{name.lower()}.toml").read_text(encoding="utf-8"))


def _section(name: str, kind: type, table: Any) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} = {table!r} should be a table: write [{name}] and its keys below it")
    table = {key: value for key, value in table.items() if f"{name}.{key}" not in RETIRED}
    if name == "model":
        name_of_preset = typed("model.preset", table.get("preset", "tiny"), str).lower()
        table = {**preset(name_of_preset), **table, "preset": name_of_preset}
    types = typing.get_type_hints(kind)
    for key in table:
        if key not in types:
            raise ConfigError(f"unknown key {name}.{key}; {_meant(f'{name}.{key}')}valid: {', '.join(sorted(types))}")
    return kind(**{key: _value(f"{name}.{key}", value, types[key]) for key, value in table.items()})


def _value(key: str, value: Any, kind: Any) -> Any:
    """The value of a key, or of a table inside a table."""
    is_table = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    return _section(key, kind, value) if is_table else checked(key, value, kind)


def _override(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().rpartition(".")
    if not (equals and dot and name and section):
        meant = key_meant(key.strip(), key_names()) or "mesh.dp"
        raise ConfigError(f"--set {override!r} should read table.key=value, for example {meant}={text or 4}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string: --set run.name=first
    if not isinstance(value, str) and _kind(section, name) is str:
        value = text  # --set run.name=2026
    table: Any = tables
    for title in section.split("."):
        table = table.setdefault(title, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section} = {table!r} should be a table: write [{section}] and its keys below it")
    table[name] = value


def check_together(config: Config) -> None:
    """Raises ConfigError for keys that are fine by themselves, but not together."""
    model, data = config.model, config.data
    if not model.head_channels and model.hidden % model.heads:
        raise ConfigError(
            f"model.hidden = {model.hidden} does not split into model.heads = {model.heads}; "
            f"valid heads: {divisors(model.hidden)}; or give model.head_channels, the channels of one head"
        )
    if model.heads % model.key_value_heads:
        raise ConfigError(
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"valid: {divisors(model.heads)}"
        )
    turned = model.turned_channels
    if model.positions == "rotary" and (turned % 2 or not turned):
        raise ConfigError(
            f"model.rope_fraction = {model.rope_fraction} of a head's {model.head_dim} channels (model.hidden / "
            f"model.heads, or model.head_channels) is {turned}; rotary positions turn pairs: it must be even, not 0"
        )
    if model.rope_scaling == "llama3" and model.rope_low_frequency >= model.rope_high_frequency:
        raise ConfigError(
            f"model.rope_low_frequency = {model.rope_low_frequency} is not below model.rope_high_frequency = "
            f"{model.rope_high_frequency}; Llama 3 has 1 and 4"
        )
    if data.sequence_length > model.max_sequence:
        raise ConfigError(
            f"data.sequence_length = {data.sequence_length} is longer than "
            f"model.max_sequence = {model.max_sequence}; lower the one or raise the other"
        )
    if config.evaluation.every_steps and not config.evaluation.tasks:
        raise ConfigError(
            f"evaluation.every_steps = {config.evaluation.every_steps} without evaluation.tasks: there is nothing to "
            "measure; valid: tasks = ['reverse:5', ...], or every_steps = 0"
        )
    if late := [step for step in config.log.trace_steps if step > config.run.steps]:
        raise ConfigError(f"log.trace_steps has {late[0]}, but run.steps = {config.run.steps}; valid: 1 to that")
    _check_pipeline(config.pipeline, model)
    _check_communication(config.communication)
    _check_shard(config)
    _check_compile(config)
    _check_finetuning(config)


def _check_finetuning(config: Config) -> None:
    finetuning = config.finetuning
    if finetuning.kind == "dpo" and not config.run.start_from:
        raise ConfigError(
            "finetuning.kind = 'dpo' needs run.start_from, a checkpoint or a Hugging Face folder: answers are compared "
            "with what its weights make of them"
        )
    if finetuning.kind == "dpo" and not config.data.document_mask:
        raise ConfigError(
            "data.document_mask = false with finetuning.kind = 'dpo': the rejected answer would see the chosen one; "
            "valid: true"
        )
    if finetuning.adapter.rank and finetuning.kind == "none":
        raise ConfigError(
            f"finetuning.adapter.rank = {finetuning.adapter.rank} with finetuning.kind = 'none': adapters change a "
            "model that is there; valid: finetuning.kind = 'supervised' or 'dpo', or rank = 0"
        )
    if finetuning.adapter.rank and not config.run.start_from:
        raise ConfigError(
            f"finetuning.adapter.rank = {finetuning.adapter.rank} without run.start_from: adapters change a model that "
            "is there; valid: run.start_from = 'PATH' of a Hugging Face folder or a checkpoint, or rank = 0"
        )
    for key in ("alpha", "targets", "base"):
        value, usual = getattr(finetuning.adapter, key), getattr(AdapterConfig(), key)
        if value != usual and not finetuning.adapter.rank:
            raise ConfigError(
                f"finetuning.adapter.{key} = {value!r} with finetuning.adapter.rank = 0, by which all weights are "
                f"trained; valid: {key} = {usual!r}, or a rank of 1 or more"
            )
    if finetuning.beta != FinetuningConfig().beta and finetuning.kind != "dpo":
        raise ConfigError(
            f"finetuning.beta = {finetuning.beta:g} with finetuning.kind = {finetuning.kind!r}, which has no reference "
            f"to leave; valid: {FinetuningConfig().beta}, or finetuning.kind = 'dpo'"
        )
    _check_groups(config)


def _check_groups(config: Config) -> None:
    """Raise ConfigError if tp would cut a group of inputs that share a scale: another layout, another model."""
    model, tp, base = config.model, config.mesh.tp, config.finetuning.adapter.base
    for what, inputs in (("heads x head_channels", model.heads * model.head_dim), ("ffn", model.ffn)):
        if base in ("int8", "int4") and tp > 1 and inputs % (GROUP * tp):
            raise ConfigError(
                f"finetuning.adapter.base = {base!r} with mesh.tp = {tp}: {what} = {inputs} would be cut inside a "
                f"group of {GROUP} inputs, which have one scale; valid: a tp that leaves each rank a multiple of "
                f"{GROUP}, or base = 'compute' or 'bf16'"
            )


def _check_pipeline(pipeline: PipelineConfig, model: ModelConfig) -> None:
    if (pipeline.schedule == "custom") != bool(pipeline.file):
        raise ConfigError(
            f"pipeline.schedule = {pipeline.schedule!r} with pipeline.file = {pipeline.file!r}; valid: 'custom' with "
            "the file of a schedule, or another schedule without one"
        )
    if pipeline.layers and sum(pipeline.layers) != model.layers:
        raise ConfigError(
            f"pipeline.layers = {list(pipeline.layers)} adds up to {sum(pipeline.layers)}, but model.layers = "
            f"{model.layers}; valid: numbers that add up to it, or [] to divide by cost"
        )


def _check_communication(communication: CommunicationConfig) -> None:
    gradients = traffic_codecs(communication)["gradients"]
    if communication.algorithm in ("native", "node_window") and gradients != "raw":
        raise ConfigError(
            f"communication.algorithm = {communication.algorithm!r} adds up values as they are, but the gradients "
            f"travel as {gradients!r}; valid: communication.gradients = 'raw', or another algorithm, such as 'auto'"
        )


def _check_shard(config: Config) -> None:
    shard, algorithm = config.optimizer.shard, config.communication.algorithm
    if shard == "all" and config.mesh.pp > 1:
        raise ConfigError(
            f"optimizer.shard = 'all' with mesh.pp = {config.mesh.pp}: each microbatch would gather a stage's weights "
            "anew; valid: mesh.pp = 1, or optimizer.shard = 'none', 'states' or 'states+gradients'"
        )
    if shard != "none" and algorithm not in ("auto", *SHARED_OUT):
        raise ConfigError(
            f"communication.algorithm = {algorithm!r} gives every replica the whole sum, but with optimizer.shard = "
            f"{shard!r} each gets its share; valid: auto, {', '.join(SHARED_OUT)}"
        )
    parameters = traffic_codecs(config.communication)["parameters"]
    if config.optimizer.offload and shard in ("states", "states+gradients") and not parse_name(parameters).lossless:
        raise ConfigError(
            f"optimizer.offload = true with optimizer.shard = {shard!r} and communication.parameters = {parameters!r} "
            "(or communication.policy), by which differences to the master weights travel while those are on their way "
            "to host memory; valid: parameters = 'raw' or another lossless codec, or offload = false"
        )


def _check_compile(config: Config) -> None:
    """A compiled block is whole: nothing of it is split over ranks, deferred, made again or taken away."""
    if not config.model.compile:
        return
    schedule, recompute = config.pipeline.schedule, config.pipeline.recompute
    for key, value, valid in (
        ("mesh.tp", config.mesh.tp, (1,)),
        ("pipeline.schedule", schedule, ("gpipe", "1f1b", "interleaved")),
        ("pipeline.recompute", recompute, ("none",)),
        ("pipeline.offload", config.pipeline.offload, (False,)),
        ("optimizer.shard", config.optimizer.shard, ("none", "states", "states+gradients")),
        ("finetuning.adapter.rank", config.finetuning.adapter.rank, (0,)),
    ):
        if value not in valid:
            raise ConfigError(
                f"model.compile = true with {key} = {value!r}, which takes blocks apart; valid: {key} = "
                f"{', '.join(map(repr, valid))}, or model.compile = false"
            )


def traffic_codecs(communication: CommunicationConfig) -> dict[str, str]:
    """Kind of traffic -> codec name, after policy and single keys. Raises ConfigError."""
    return codecs_of(communication.policy, {kind: getattr(communication, kind) for kind in TRAFFIC})
