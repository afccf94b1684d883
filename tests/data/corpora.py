"""A corpus with everything that goes wrong in practice, and what should be left of it."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path

import zstandard

WORDS = (
    "ring",
    "passes",
    "gradient",
    "naïve",
    "中文",
    "\t",
    " ",
    "\n\n",
    "e\u0301tude",
    "🚀",
    "<|end_of_text|>",
    "0x1F",
)


@dataclass(frozen=True)
class Corpus:
    inputs: tuple[Path, ...]
    documents: list[str]  # normalised, in global order, duplicates and damaged ones gone
    dropped: dict[str, int]


def some_text(seed: int) -> str:
    generator = random.Random(seed)
    return f"document {seed} " + " ".join(generator.choices(WORDS, k=generator.randint(5, 400))) + " end"


def nfc(text: str) -> str:
    return text.replace("e\u0301", "é")


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def make_corpus(folder: Path) -> Corpus:
    texts = [some_text(seed) for seed in range(60)]
    (folder / "a tree" / "deep").mkdir(parents=True)
    tree, rows = folder / "a tree", folder / "rows.jsonl"
    (tree / "a.txt").write_bytes(texts[0].replace("\n", "\r\n").encode() + b" \r\n\n")
    (tree / "b.md.gz").write_bytes(gzip.compress(texts[1].encode()))
    (tree / "bad.txt").write_bytes(b"good start \xff\xfe")
    (tree / "c.txt.zst").write_bytes(zstandard.compress(texts[2].encode()) + zstandard.compress(b" tail"))
    (tree / "cut.txt.zst").write_bytes(zstandard.compress(texts[50].encode())[:-4])
    (tree / "deep" / "same.txt").write_bytes(texts[0].encode())
    (tree / "deep" / "white.txt").write_bytes(b" \n\t\0\r\n")
    (tree / "e.bin").write_bytes(b"not text")
    (tree / ".hidden.txt").write_bytes(b"not read")
    (tree / "gone.txt").symlink_to(folder / "nowhere")
    rows.write_bytes(
        jsonl(texts[3:20])
        + b'{"text": 5}\n{"other": "x"}\n[1]\nnot json\n\n\n{"text": "\\ud800"}\n'
        + b"[" * 100_000
        + b"\n"
        + jsonl([texts[2] + " tail", *texts[20:40], texts[4]])[:-1]
    )
    kept = jsonl(texts[40:45])
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(kept) + gzip.compress(jsonl(texts[51:60]))[:12])
    documents = [texts[0], texts[1], texts[2] + " tail", *texts[3:45]]
    return Corpus(
        inputs=(tree, rows, folder / "cut.jsonl.gz"),
        documents=[nfc(text) for text in documents],
        dropped={
            "not UTF-8": 2,
            "compressed file damaged or cut short": 2,
            "empty": 1,
            "file that cannot be read": 1,
            "field missing or not a string": 2,
            "line that is not a JSON object": 3,
            "exact duplicate": 3,
        },
    )
