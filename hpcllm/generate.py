"""A checkpoint and a prompt -> text. One process; the checkpoint alone is enough: it holds tokenizer and run file."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import facts, restore, tokenizer_json
from hpcllm.config import from_tables
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import CheckpointError, ConfigError, DataError
from hpcllm.model.initialisation import allocate
from hpcllm.model.sampling import generate
from hpcllm.model.shapes import parameter_shapes, split_layers
from hpcllm.model.transformer import Decoder


def continue_prompt(path: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> Iterator[str]:
    """Pieces of text that continue `prompt`, up to `tokens` tokens or the end of the text.

    Same arguments, same text. Raises before the first piece: DataError if there is no such file or the prompt is not
    Unicode, CheckpointError if the file is damaged or of no text model, ConfigError for a setting out of range.
    """
    if not path.is_file():
        raise DataError(f"there is no checkpoint {str(path)!r}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed = {seed} is out of range; valid: 0 <= seed < 2^63")
    if any("\ud800" <= c <= "\udfff" for c in prompt):
        raise DataError("the prompt is not UTF-8; give it in that encoding, or set the locale that it is in")
    with Checkpoint.open(path) as checkpoint:
        decoder = load_decoder(checkpoint)
        text = tokenizer_json(checkpoint)
    if not text:
        raise CheckpointError(f"{path} holds no tokenizer; it cannot be asked in words")
    tokenizer = Encoder(text)
    ids = tokenizer.encode([prompt])[0].tolist()[:-1] or [tokenizer.end_of_text]  # encode closes a document
    generator = torch.Generator().manual_seed(seed)
    drawn = generate(decoder, ids, tokens, temperature, top_k, generator, tokenizer.end_of_text, tokenizer.vocabulary)
    return _as_text(drawn, tokenizer)


def _as_text(tokens: Iterator[int], tokenizer: Encoder) -> Iterator[str]:
    # a character may take several tokens: pieces wait in the decoder until they are whole
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield whole.decode(tokenizer.decode(np.array([token])))
    yield whole.decode(b"", final=True)


def load_decoder(checkpoint: Checkpoint) -> Decoder:
    """The whole model of a checkpoint. Raises CheckpointError."""
    model = from_tables(facts(checkpoint).config).model
    decoder = allocate(model, split_layers(model, 1)[0])
    restore(checkpoint, parameter_shapes(model), dict(decoder.named_parameters()), {}, {})
    return decoder
