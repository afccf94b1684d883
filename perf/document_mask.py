"""Time of a step where attention stops at document borders, beside the same step without borders.

    python perf/document_mask.py [--json [FILE]]

One process, 4 blocks of 256 channels, a row of 1024 tokens, which documents of equal length fill. Both steps of a line
take turns, forward and backward pass; the ratio is the median of those of neighbours, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from hpcllm.config.schema import ModelConfig
from hpcllm.model.documents import Documents
from hpcllm.model.initialisation import CPU, allocate_chunks, initial_values
from hpcllm.model.shapes import StageSpan
from hpcllm.model.tensor_parallel import ALONE
from hpcllm.model.transformer import Decoder
from hpcllm.system.output import add_output, show
from hpcllm.system.text import table

SEQUENCE, ROWS, LENGTHS, TURNS = 1024, 1, (1024, 512, 256, 128, 64, 32), 7
MODEL = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocabulary=512, max_sequence=SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser, "times in seconds, ratios and quartiles")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    (decoder,) = allocate_chunks(MODEL, [StageSpan(0, MODEL.layers, True, True)], ALONE, torch.float32, CPU)
    fill = initial_values(MODEL, 0, ALONE)
    for name, parameter in decoder.named_parameters():
        fill(name, parameter.detach())
    rows = [measured(decoder, length) for length in LENGTHS]
    cells = [
        [f"{row['length']}", *(f"{row[key]:.2f}" for key in ("whole_s", "masked_s", "ratio", "low", "high"))]
        for row in rows
    ]
    titles = ["tokens a document", "no borders s", "borders s", "ratio", "quartiles", ""]
    show(arguments, {"rows": rows}, table(titles, cells))


def measured(decoder: Decoder, length: int) -> dict[str, float]:
    """Time both steps in turns. length: of every document."""
    lengths = np.full(ROWS * SEQUENCE // length, length)
    positions = torch.arange(length).repeat(SEQUENCE // length).expand(ROWS, SEQUENCE)
    documents = Documents(lengths, positions)
    pairs = [(step_s(decoder, None), step_s(decoder, documents)) for _ in range(TURNS + 1)][1:]
    low, ratio, high = statistics.quantiles([masked / whole for whole, masked in pairs], n=4)
    whole_s, masked_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"length": length, "whole_s": whole_s, "masked_s": masked_s, "ratio": ratio, "low": low, "high": high}


def step_s(decoder: Decoder, documents: Documents | None) -> float:
    tokens = torch.randint(MODEL.vocabulary, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(1))
    start_s = time.perf_counter()
    decoder.nats(decoder.hidden_states(tokens, None, documents=documents), tokens).sum().backward()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
