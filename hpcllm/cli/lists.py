"""The commands that list what there is, and the one that begins a run file.

keys [PATTERN]   of a run file: type, default, reason, valid values         init RUN.toml   all of them, in a file
presets          shapes of models                                           machines        known supercomputers
codecs           encodings of messages, and what each policy chooses
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.cli.options import file_or_folder
from hpcllm.codecs.names import examples, parse_name
from hpcllm.config import machines, schema
from hpcllm.config.names import closest, key_meant
from hpcllm.config.policies import POLICIES, TRAFFIC
from hpcllm.config.reference import find, keys, run_file
from hpcllm.errors import ConfigError
from hpcllm.system.output import add_output, say, show
from hpcllm.system.raw_files import writing
from hpcllm.system.text import table

CODECS = {  # kind -> what it does
    "raw": "the values as they are",
    "bf16": "rounded to bfloat16",
    "fp16": "rounded to float16",
    "fp8": "8 bits, e4m3, one scale a block of values",
    "int8": "8 bits, one scale a block of values",
    "int4": "4 bits, one scale a block of values",
    "exp": "exponents by how often they come, the rest as it is",
    "zfp": "zfp of one dimension, so many bits a value",
    "mpc": "MPC: differences, transposed bits, no zero words",
}


class Listed(NamedTuple):
    """A list for programs and for people."""

    facts: Any
    lines: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of one of the commands."""
    name = parser.get_default("command_name")
    parser.description = ABOUT[name]
    if name == "init":
        parser.add_argument("path", type=file_or_folder, metavar="RUN.toml", help="the new file")
        return
    if name == "keys":
        words = "a table, a part of a name, * and ?, or a word of the reason (default: all keys)"
        parser.add_argument("pattern", nargs="?", default="", metavar="PATTERN", help=words)
    add_output(parser, "the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print a list, or write a run file. Raises ConfigError."""
    if arguments.command_name == "init":
        return _init(arguments.path)
    found = LISTS[arguments.command_name](arguments)
    show(arguments, found.facts, found.lines)
    return 0


def _init(path: Path) -> int:
    if os.path.lexists(path):
        raise ConfigError(f"{str(path)!r} is there already; valid: the name of a new file")
    with writing(repr(str(path))), path.open("x", encoding="utf-8") as file:
        file.write(run_file())
    say([f"written: {path}; give data.store the file that `hpcllm prepare` writes, then: hpcllm train {path}"])
    return 0


def _keys(arguments: argparse.Namespace) -> Listed:
    found = find(arguments.pattern) if arguments.pattern else list(keys())
    if not found:
        near = key_meant(arguments.pattern, schema.key_names()) or closest(arguments.pattern, TABLES)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"no key matches {arguments.pattern!r}{hint}; tables: {', '.join(TABLES)}")
    lines: list[str] = []
    title = ""
    for key in found:
        if key.table != title:
            title = key.table
            lines += ["", f"[{title}]"] if lines else [f"[{title}]"]
        lines.append(f"{key.name} = {key.default}")
        lines.append(f"    {key.about}")
        lines.append(f"    {key.type}{f'; valid: {key.valid}' if key.valid else ''}")
    return Listed([key._asdict() for key in found], lines)


TABLES = list(dict.fromkeys(key.table for key in keys()))


def _presets(_: argparse.Namespace) -> Listed:
    from hpcllm.model.shapes import parameter_count

    facts = []
    for name in schema.preset_names():
        model = schema.from_tables({"model": {"preset": name}, "data": {"sequence_length": 1}}).model
        shape = {key: getattr(model, key) for key in ("layers", "hidden", "heads", "vocabulary", "max_sequence")}
        facts.append({"name": name, "parameters": parameter_count(model), **shape})
    head = ["preset", "parameters", "layers", "hidden", "heads", "vocabulary", "sequence"]
    rows = [[f"{v:,}" if k == "parameters" else str(v) for k, v in fact.items()] for fact in facts]
    note = "model.preset of a run file, --model of plan; vocabulary 0: that of the token store"
    return Listed(facts, [*table(head, rows, indent="", gap="  "), "", note])


def _machines(_: argparse.Namespace) -> Listed:
    facts: list[dict[str, Any]] = []
    for name in machines.names():
        known = machines.load(name)
        device = known.get("device", {})
        node = {"devices_per_node": device.get("per_node", 0), "device": device.get("name", "")}
        facts.append({"name": name, "machine": known.get("name", ""), "nodes": known.get("nodes", 0), **node})
    rows = [
        [f["name"], str(f["nodes"] or ""), str(f["devices_per_node"] or ""), f["device"] or "its CPUs"] for f in facts
    ]
    note = "run.machine of a run file, --machine of plan; a file like those of hpcllm/config/machines goes, too"
    return Listed(facts, [*table(["machine", "nodes", "a node", "device"], rows, indent="", gap="  "), "", note])


def _codecs(_: argparse.Namespace) -> Listed:
    names = [(name, parse_name(name)) for name in examples()]
    facts: list[dict[str, Any]] = [
        {
            "name": name,
            "lossless": codec.lossless,
            "bits_of_float32": codec.bits(32),
            "about": CODECS[codec.kind],
        }
        for name, codec in names
    ]
    rows = [[f["name"], f"{f['bits_of_float32']:.4g}", "yes" if f["lossless"] else "no"] for f in facts]
    numbers = table(["codec", "bits", "lossless"], rows, indent="", gap="  ")
    about = ["what it does", *(f["about"] for f in facts)]  # aligned to the left, unlike numbers
    lines = [f"{line}  {words}" for line, words in zip(numbers, about, strict=True)]
    policies = [[name, *(codecs.get(kind, "raw") for kind in TRAFFIC)] for name, codecs in POLICIES.items()]
    notes = [
        "bits: of a float32 value on the wire; of exp and mpc as measured on gradients",
        "int8:256:sr and int4:128:sr round stochastically",
    ]
    chosen = table(["policy", *TRAFFIC], policies, indent="", gap="  ", left=6)
    return Listed({"codecs": facts, "policies": POLICIES}, [*lines, "", *notes, "", *chosen])


LISTS: dict[str, Callable[[argparse.Namespace], Listed]] = {
    "keys": _keys,
    "presets": _presets,
    "machines": _machines,
    "codecs": _codecs,
}
ABOUT = {
    "init": "Write a run file in which every key stands with its default and its reason, ready to be changed.",
    "keys": "List the keys of a run file: default, reason, type and valid values.",
    "presets": "List the shapes of models that model.preset takes.",
    "machines": "List the machines that run.machine and plan --machine take.",
    "codecs": "List the codecs that messages can travel in, and which of them each policy chooses.",
}
