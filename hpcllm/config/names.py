"""Names that users mistype: the nearest valid one, and the key that another trainer's word stands for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST_SHOWN = 100  # characters of a value that a message repeats
MANY = 10**40
SYNONYMS = {  # what other trainers call a key -> the key, its table where the name alone would be another one
    "lr": "learning_rate",
    "max_lr": "learning_rate",
    "min_lr": "final_fraction",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "optimizer.epsilon",
    "eps": "optimizer.epsilon",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "lr_warmup_steps": "warmup_steps",
    "grad_clip": "clip_norm",
    "clip": "clip_norm",
    "clip_grad": "clip_norm",
    "max_grad_norm": "clip_norm",
    "zero_stage": "shard",
    "zero": "shard",
    "batch": "global_batch",
    "batch_size": "global_batch",
    "global_batch_size": "global_batch",
    "seq_len": "sequence_length",
    "seq_length": "sequence_length",
    "block_size": "sequence_length",
    "context_length": "sequence_length",
    "dataset": "store",
    "data_path": "store",
    "max_steps": "run.steps",
    "train_iters": "run.steps",
    "iterations": "run.steps",
    "iters": "run.steps",
    "max_iters": "run.steps",
    "steps": "run.steps",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "hidden_size": "hidden",
    "n_embd": "hidden",
    "d_model": "hidden",
    "num_heads": "heads",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "ffn_hidden_size": "ffn",
    "intermediate_size": "ffn",
    "vocab_size": "vocabulary",
    "vocab": "vocabulary",
    "tensor_parallel": "mesh.tp",
    "tensor_model_parallel_size": "mesh.tp",
    "pipeline_parallel": "mesh.pp",
    "pipeline_model_parallel_size": "mesh.pp",
    "data_parallel": "mesh.dp",
    "micro_batches": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "dtype": "compute",
    "precision": "compute",
    "bf16": "compute",
    "fp16": "compute",
    "codec": "gradients",
    "save_interval": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps",
    "log_interval": "log.every_steps",
    "eval_interval": "validation_every_steps",
    "eval_every": "validation_every_steps",
    "resume": "start_from",
    "model": "preset",
    "exp_name": "run.name",
    "timeout": "stall_s",
}


def shown(value: object) -> str:
    """Write a value of a user for a message as Python writes it, but never more than a line of it."""
    if isinstance(value, int) and abs(value) >= MANY:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    try:
        text = repr(value)
    except ValueError:  # numbers of thousands of digits, in a list
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Nearest valid name, and all valid ones, for the message of an error."""
    every = sorted(valid)
    close = closest(name, every)
    return f"{f'did you mean {close}? ' if close else ''}valid: {', '.join(every)}"


def closest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the one valid name that is nearest to a mistyped one in any case, "" if none is near."""
    if len(name) > LONGEST_SHOWN:  # no name is so long, and to compare takes the square of its length
        return ""
    import difflib  # only where a mistake is explained: --help has no time for it

    by_lower = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(name.lower(), list(by_lower), 1, cutoff)
    return by_lower[close[0]] if close else ""


def key_meant(word: str, keys: Sequence[str]) -> str:
    """Return which of the keys 'table.name' a mistyped or foreign word means, "" if none.

    word: with or without its table, with - or _: lr is optimizer.learning_rate.
    A key of the same table comes before others of the same name.
    """
    table, _, name = word.lower().replace("-", "_").rpartition(".")
    own = [key for key in keys if key.startswith(f"{table}.")]
    name = SYNONYMS.get(name, name)
    if name in keys:
        return name
    for group, cutoff in ((own, 0.6), (list(keys), 0.75)):
        by_name = {key.partition(".")[2]: key for key in reversed(group)}
        if close := closest(name, by_name, cutoff):
            return by_name[close]
    return ""
