"""Text -> its normal form, its name (a digest), and the split that the name falls into. Pure.

    text -> NFC, '\\n' line ends, no NUL, no white space at the end -> blake2b-128 -> keyed blake2b-64 < fraction?
                                                                      (digest)      (key)       validation : train

The key depends on the seed and the text alone: adding, removing or reordering documents moves no other document from
one split to the other, and equal text can never stand in both.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

DIGEST_BYTES = 16
_LINE_END = re.compile(r"\r+\n")


def normalise(text: str) -> str:
    """The form in which documents are compared, counted and tokenized; applying it twice changes nothing.

    A carriage return alone stays: it does not end a line on any system of today.
    """
    return unicodedata.normalize("NFC", _LINE_END.sub("\n", text.replace("\0", ""))).rstrip()


def digest(text: str) -> bytes:
    """16 bytes by which equal documents are found; by chance alone 2^64 documents would be needed for a clash."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest()


def split_key(document_digest: bytes, seed: int) -> int:
    """A number below 2^64, uniform over documents, another one for each seed (0 <= seed < 2^63)."""
    keyed = hashlib.blake2b(document_digest, digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(keyed.digest(), "little")


def validation_keys(validation_fraction: float) -> int:
    """Documents with a key below this number are validation documents; 0 <= validation_fraction < 1."""
    return int(validation_fraction * 2.0**64)
