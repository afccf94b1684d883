"""Byte-level BPE: trained here on a sample of the documents, or loaded; lossless either way.

    "hé\\n" -> bytes 68 c3 a9 0a -> one printable character a byte "hÃ©Ċ" -> merged into tokens of the vocabulary

The table from bytes to characters is GPT-2's: bytes that print stay themselves, the others move to U+0100 and up.
Because each character of a token stands for one byte, the length of a token is the number of bytes it costs, and the
lengths of a document's tokens must add up to the document: checked for every document, so nothing is lost unseen.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.checkpoint.directory import is_ours, open_regular
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.layout import END_OF_TEXT, END_OF_TEXT_NAMES, TOKENIZER
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.data.documents import normalise
from hpcllm.data.store import LARGEST_TOKENIZER_BYTES, LARGEST_VOCABULARY
from hpcllm.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

    from hpcllm.data.chat import Rendered

SMALLEST_VOCABULARY = 257  # every byte and the end of text
LONGEST_WORD = 256  # characters; longer than any word of a language, shorter than data that stands in a text
_WORD = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
PIECE_CHARACTERS = 2**20  # a longer document is encoded in pieces: its tokens' bookkeeping takes 100 bytes a token
_PROBE = normalise(
    "".join(map(chr, range(1, 0x250)))
    + "  two  spaces\t\ttabs\r\n\n\n    indented\n1234567890 x=1;y!=2 don't DON'T Straße naïve Ελληνικά кириллица "
    + "中文字 日本語 한국어 עברית العربية हिन्दी \U0001f469\u200d\U0001f52c \ufeff\u2028\u00a0\u200b\U0010ffff."
)


def train(texts: Iterable[str], vocabulary: int, controls: Sequence[str] = ()) -> str:
    """Train byte-level BPE of at most `vocabulary` tokens, fewer when the texts offer no more merges: tokenizer JSON.

    controls: tokens of a chat template, which the vocabulary holds beside the end of text.
    The result depends on the set of texts only: not on their order, nor on the number of threads. Words longer than
    LONGEST_WORD are cut first, for a merge takes time that is quadratic in the longest word.
    """
    tokenizers = library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *controls],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut_long_words(text)), trainer)
    tokenizer_json: str = tokenizer.to_str()
    return tokenizer_json


def cut_long_words(text: str) -> list[str]:
    """Cut a text inside its words of more than LONGEST_WORD characters; most texts come back in one piece.

    A word here is what no pre-tokenizer cuts: a run of letters, of digits, of white space or of other characters. One
    that is too long covers two multiples of half of LONGEST_WORD, so only those places are looked at:

        .......|...xxxx|xxxxxxx|xxxxxxx|xxxx...|      at the first: how far does the run go on, and how far back?
    """
    pieces, done, place, half = [], 0, 0, LONGEST_WORD // 2
    while place < len(text):
        run = _WORD.match(text, place)
        end = run.end() if run else place + 1
        if end - place >= half:
            back = _WORD.match(text[place] + text[max(0, place - half) : place][::-1])
            start = place + 1 - (back.end() if back else 1)
            for seam in range(start + LONGEST_WORD, end, LONGEST_WORD):
                pieces.append(text[done:seam])
                done = seam
        place = -(-max(end, place + 1) // half) * half
    return [*pieces, text[done:]]


def long_words(texts: Iterable[str]) -> int:
    """Count the cuts that `train` makes in texts."""
    return sum(len(cut_long_words(text)) - 1 for text in texts)


def load(path: Path) -> str:
    """Read tokenizer JSON: a tokenizer.json or its folder, or /tokenizer of a store, checkpoint or run.

    A tokenizer without an end-of-text token that we know gets ours, at the end of its vocabulary. Raises DataError.
    """
    tokenizer = _parsed(_read(path), f"the tokenizer {str(path)!r}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if _end_of_text(tokenizer) is None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer_json: str = tokenizer.to_str()
    _check_lossless(tokenizer_json, path)
    return tokenizer_json


def end_of_text_of(tokenizer_json: str) -> str:
    """Return the spelling of the end of text of a tokenizer that `load` has read."""
    encoder = Encoder(tokenizer_json)
    return encoder.spelled(np.array([encoder.end_of_text]))


def controls_of(tokenizer_json: str) -> dict[str, bool]:
    """Return the added tokens of a tokenizer: spelling -> special, so of no text."""
    added = _parsed(tokenizer_json).get_added_tokens_decoder().values()
    return {token.content: token.special for token in added}


class Encoder:
    """Texts <-> token ids. Text that looks like a special token is encoded as ordinary text."""

    def __init__(self, tokenizer_json: str) -> None:
        self.tokenizer_json = tokenizer_json
        self._tokenizer: Tokenizer = _parsed(tokenizer_json)
        self._tokenizer.encode_special_tokens = True
        falls_back = bool(json.loads(tokenizer_json)["model"].get("byte_fallback"))
        self._spelled = _spelled_out if falls_back else _by_character
        length = (lambda token: len(_spelled_out(token))) if falls_back else len
        self.token_bytes = _token_bytes(self._tokenizer, length)  # (vocabulary,) uint32, 0 for special and unused ids
        end_of_text = _end_of_text(self._tokenizer)
        if end_of_text is None:
            raise DataError(f"the tokenizer has no end of text; valid: one of {', '.join(END_OF_TEXT_NAMES)}, special")
        self.end_of_text = end_of_text

    @property
    def vocabulary(self) -> int:
        return len(self.token_bytes)

    def id_of(self, token: str) -> int:
        """Return the id of a token that the tokenizer has."""
        found = self._tokenizer.token_to_id(token)
        assert found is not None
        return found

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the token ids of each text, with an end of text."""
        end = np.array([self.end_of_text], np.uint32)
        return [np.concatenate([ids, end]) for ids in _encoded(self._tokenizer, texts)]

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts in front of a text, as the "<s>" of Llama; of most there are none."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        ends = range(len(whole) - len(plain), -1, -1)
        return tuple(whole[: next((end for end in ends if whole[end : end + len(plain)] == plain), 0)])

    def encode_chats(self, chats: Sequence[Rendered]) -> list[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
        """Return ids, and whether each counts as a target, of rendered conversations; without an end of text.

        Between control tokens no text becomes an added token, special or not. A token counts if a byte that it stands
        for does, as with the assistant masks of transformers.
        """
        between = [chat.text[a:b] for chat in chats for a, b, is_control in chat.pieces() if not is_control]
        ids_between = iter(_encoded(self._strict, between))
        found = []
        for chat in chats:
            ids, counted = [np.empty(0, np.uint32)], [np.empty(0, np.bool_)]
            for first, end, is_control in chat.pieces():
                control = self._tokenizer.token_to_id(chat.text[first:end]) if is_control else None
                ids.append(next(ids_between) if control is None else np.array([control], np.uint32))
                counted.append(self._counted(chat, first, end, None if is_control else ids[-1]))
            found.append((np.concatenate(ids), np.concatenate(counted)))
        return found

    def _counted(self, chat: Rendered, first: int, end: int, ids: NDArray[np.uint32] | None) -> NDArray[np.bool_]:
        """Return which tokens of the characters first to end meet a counted span. ids: None of a control token."""
        spans = [(max(a, first), min(b, end)) for a, b in chat.counted if a < end and b > first]
        if ids is None:
            return np.array([bool(spans)])
        ends = np.cumsum(self.token_bytes[ids], dtype=np.int64)
        counted = np.zeros(len(ids), np.bool_)
        for a, b in spans:
            start, stop = (len(chat.text[first:place].encode("utf-8")) for place in (a, b))
            counted |= (ends > start) & (ends - self.token_bytes[ids] < stop)
        return counted

    @cached_property
    def _strict(self) -> Tokenizer:
        """The tokenizer with all of its added tokens special, so that text becomes none of them."""
        facts = json.loads(self.tokenizer_json)
        for token in facts.get("added_tokens") or ():
            token["special"] = True
        strict = _parsed(json.dumps(facts))
        strict.encode_special_tokens = True
        return strict

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """Return the bytes that tokens stand for; special tokens stand for none.

        Raises KeyError if the tokenizer is neither byte-level nor has a byte fallback.
        """
        return b"".join(map(self._bytes_of, ids.tolist()))

    def spelled(self, ids: NDArray[np.integer]) -> str:
        """Return text for people: special tokens by their names, bytes that are no text as U+FFFD."""
        special = self._tokenizer.get_added_tokens_decoder()
        parts = (special[i].content.encode("utf-8") if i in special else self._bytes_of(i) for i in ids.tolist())
        return b"".join(parts).decode("utf-8", "replace")

    def _bytes_of(self, id_: int) -> bytes:
        if added := self._tokenizer.get_added_tokens_decoder().get(id_):
            return _added_bytes(added)
        token = self._tokenizer.id_to_token(id_)
        if token is None:
            raise KeyError(id_)
        return self._spelled(token)


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """Return the ids of each text. Uses the library's threads, no fork."""
    pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
    encodings = tokenizer.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
    ids: list[list[NDArray[np.uint32]]] = [[] for _ in texts]
    for (i, _), encoding in zip(pieces, encodings, strict=True):
        ids[i].append(np.array(encoding.ids, np.uint32))
    return [np.concatenate(parts) for parts in ids]


def _read(path: Path) -> str:
    """Read the text of a tokenizer from a regular file of bounded size. Raises DataError."""
    if (path / "tokenizer.json").is_file():
        path /= "tokenizer.json"
    try:
        path = next(iter(newest_first(path / "checkpoints")), path)
        if is_ours(path):
            with Checkpoint.open(path) as file:
                stored = file.datasets.get(TOKENIZER)
                if stored is None or stored.spec.bytes > LARGEST_TOKENIZER_BYTES:
                    raise CheckpointError(f"it has no /{TOKENIZER} of up to {LARGEST_TOKENIZER_BYTES:,} bytes")
                return file.read_whole(TOKENIZER).tobytes().decode("utf-8")
        with os.fdopen(open_regular(path), "rb") as plain:
            data = plain.read(LARGEST_TOKENIZER_BYTES + 1)
        if len(data) > LARGEST_TOKENIZER_BYTES:
            raise CheckpointError(f"it is larger than {LARGEST_TOKENIZER_BYTES:,} bytes")
        return data.decode("utf-8")
    except (CheckpointError, UnicodeDecodeError) as error:
        raise DataError(f"the tokenizer {str(path)!r} cannot be read: {error}; give a tokenizer.json") from error


def _parsed(tokenizer_json: str, name: str = "the tokenizer") -> Tokenizer:
    """Parse a tokenizer that may come from anyone. Raises DataError."""
    tokenizers = library()
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the library raises plain Exception for what it cannot parse, or panics
        words = str(error)[:200]
        raise DataError(f"{name} cannot be read: {words}; give a tokenizer.json") from error
    largest = max(vocabulary.values(), default=0)
    if largest >= LARGEST_VOCABULARY:  # token_bytes has an entry for each id up to it
        raise DataError(f"{name} has a token of id {largest}; valid: below {LARGEST_VOCABULARY}")
    return tokenizer


def _by_character(token: str) -> bytes:
    return bytes(_byte_of()[character] for character in token)


def _spelled_out(token: str) -> bytes:
    """Bytes of a token as Llama 2 spells it: '▁' for a space, '<0x0A>' for a byte that is in no other token."""
    byte = _FALLBACK.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _end_of_text(tokenizer: Tokenizer) -> int | None:
    """Id of the end of text; only a special token will do: text may contain an ordinary token that reads "</s>"."""
    special = {added.content: id_ for id_, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return next((special[name] for name in END_OF_TEXT_NAMES if name in special), None)


def _token_bytes(tokenizer: Tokenizer, length: Callable[[str], int]) -> NDArray[np.uint32]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.uint32)
    for token, id_ in vocabulary.items():
        lengths[id_] = length(token)
    for id_, added in tokenizer.get_added_tokens_decoder().items():
        lengths[id_] = len(_added_bytes(added))
    return lengths


def _added_bytes(added: AddedToken) -> bytes:
    return b"" if added.special else added.content.encode("utf-8")


def _pieces(text: str) -> Iterator[str]:
    """Cut after a line end where there is one: no token of ordinary text is lost at the seam."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
        end = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _check_lossless(tokenizer_json: str, path: Path) -> None:
    encoder = Encoder(tokenizer_json)
    try:
        held = encoder.decode(encoder.encode([_PROBE])[0])
    except KeyError:
        held = b""
    if held != _PROBE.encode("utf-8"):
        raise DataError(
            f"the tokenizer {str(path)!r} is not byte-level BPE: text does not come back from its tokens; "
            "valid: a tokenizer in the manner of GPT-2 or Llama 3, or none, to have one trained"
        )


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's table from printable characters back to bytes (Radford et al. 2019, the encoder released with it)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def library() -> Any:
    """The `tokenizers` package, imported on first use. Raises DataError that says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError("text needs the `tokenizers` library: pip install tokenizers") from error
    return tokenizers
