"""Every key of a run file with its type, default, reason and valid values, read from schema.py: the one source.

    keys()           rows, for `hpcllm keys` and the documents
    find(pattern)    the rows that a word names
    run_file()       a commented run file, for `hpcllm init`

The reason of a key is the comment behind its field, so that whoever reads the schema and whoever asks the command reads
the same words. Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import json
import textwrap
import tokenize
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcllm.config import schema
from hpcllm.config.rules import RULES

TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
COLUMNS = 80
NEEDED = ("run.name", "data.store")  # keys of the smallest useful run file: `init` does not comment them out


class Key(NamedTuple):
    """One key of a run file."""

    key: str  # with its table: "optimizer.learning_rate"
    type: str  # in words: "number"
    default: str  # as TOML: '"tiny"', "3e-4", "[]"
    about: str  # one line: what it is, in which unit, what a special value means
    valid: str  # its choices or its range; empty: any value of the type

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@cache
def keys() -> tuple[Key, ...]:
    """List the keys of a run file, in the order of the schema."""
    comments, found = _comments(), []
    for title, kind in schema.sections().items():
        types = typing.get_type_hints(kind)
        for field in schema.plain_keys(kind):
            key, declared = f"{title}.{field.name}", types[field.name]
            about = comments.get((kind.__name__, field.name), "")
            found.append(Key(key, _type(declared), _toml(field.default), about, _valid(key, declared)))
    return tuple(found)


def find(pattern: str) -> list[Key]:
    """List the keys that match a pattern: of a table, a part of a key's name, with * and ?, or a word of the reason.

    Names come before reasons: a word that stands in a key's name finds those keys alone.
    """
    word = pattern.strip().lower()
    if any(sign in word for sign in "*?["):
        return [each for each in keys() if fnmatch.fnmatchcase(each.key, word)]
    by_table = [each for each in keys() if each.table == word.rstrip(".")]
    by_name = [each for each in keys() if word in each.key]
    return by_table or by_name or [each for each in keys() if word in each.about.lower()]


def run_file() -> str:
    """Write a run file in which every key stands commented out, with its default and its reason."""
    wrap = textwrap.TextWrapper(COLUMNS, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False).wrap
    lines = wrap("A run file of hpcllm. Take the # from a key to give it another value; the one shown is its default.")
    table = ""
    for key in keys():
        if key.table != table:
            table = key.table
            lines += ["", f"[{table}]"]
        lines += wrap(key.about + (f" (valid: {key.valid})" if key.valid else ""))
        lines.append(f"{'' if key.key in NEEDED else '#'}{key.name} = {key.default}")
    return "\n".join(lines) + "\n"


def _comments() -> dict[tuple[str, str], str]:
    """Read (class, field) -> the comment behind the field, from the text of schema.py."""
    text = Path(schema.__file__).read_text(encoding="utf-8")
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    behind = {token.start[0]: token.string for token in read if token.type == tokenize.COMMENT}
    return {
        (part.name, typing.cast(ast.Name, field.target).id): behind[field.end_lineno or 0].removeprefix("#").strip()
        for part in ast.parse(text).body
        if isinstance(part, ast.ClassDef)
        for field in part.body
        if isinstance(field, ast.AnnAssign) and field.end_lineno in behind
    }


def _type(declared: Any) -> str:
    """Name a declared type in words."""
    if typing.get_origin(declared) is Literal:
        return "choice"
    if typing.get_origin(declared) is tuple:
        return f"list of {'whole numbers' if typing.get_args(declared)[0] is int else 'names'}"
    return TYPES[declared]


def _valid(key: str, declared: Any) -> str:
    """Return the choices or the range of a key."""
    if typing.get_origin(declared) is Literal:
        return ", ".join(typing.get_args(declared))
    return RULES[key][0] if key in RULES else ""


def _toml(value: Any) -> str:
    """Write a default as a run file has it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
