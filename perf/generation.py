"""Tokens a second of generated text, beside `generate` of transformers with the same weights and threads.

    python perf/generation.py [--json [FILE]] [--threads N] [--turns N] [--models 26m ...]

Random weights of a Llama, which both load from one folder; prompts of 32 tokens, 64 new ones, the likeliest each. Both
take turns, ours and theirs one after the other; a turn's ratio is ours over theirs, and its interval is that of the
median (the order statistics that hold it with 95 %). The bound: bytes of all weights but the embedding, read once a
pass, over the rate at which this machine reads memory, measured beside it. Rows of 8 and 4 bits are ours beside theirs
in fp32: transformers has no such weights on CPUs without another library. MB: of all weights, as ours are held.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from hpcllm.checkpoint.huggingface.quantise import quantise
from hpcllm.inference.batch import Request
from hpcllm.inference.complete import BatchSettings, generate_batch
from hpcllm.inference.generate import load_model
from hpcllm.model.initialisation import CPU
from hpcllm.model.sampling import Sampling
from hpcllm.model.transformer import Decoder
from hpcllm.system.hardware.node import multiplies
from hpcllm.system.output import add_output, show
from hpcllm.system.text import table

PROMPT, NEW, VOCABULARY = 32, 64, 8192
MODELS = {"26m": (8, 512), "125m": (12, 896)}  # layers, hidden
GREEDY = Sampling(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add_output(parser, "times in seconds, ratios and intervals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    dtypes = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if multiplies("bf16") else {})
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            made = llama(*MODELS[name])
            made.save_pretrained(folder)
            for precision, dtype in dtypes.items():
                theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
                for held, ours in models(Path(folder), precision, dtype):
                    for batch in (1, 16):
                        rows.append({"model": name, "type": held} | measured(ours, theirs, batch, arguments.turns))
    titles = ["model", "type", "MB", "texts", "ours", "transformers", "ratio", "95 %", "bound"]
    cells = [
        [
            *(str(row[key]) for key in ("model", "type")),
            *(f"{row['bytes'] / 1e6:.1f}", str(row["batch"])),
            *(f"{row[key]:.0f}" for key in ("ours", "theirs")),
            *(f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['bound']:.0f}"),
        ]
        for row in rows
    ]
    show(arguments, {"threads": arguments.threads, "rows": rows}, table(titles, cells))


def models(folder: Path, precision: str, dtype: torch.dtype) -> Iterator[tuple[str, Decoder]]:
    """Yield our model of a folder in a type; in fp32 also with weights of 8 and of 4 bits."""
    yield precision, load_model(folder, True, dtype, CPU, None)
    for bits in (8, 4) if precision == "fp32" else ():
        quantise(folder, folder / f"int{bits}", bits)
        yield f"int{bits}", load_model(folder / f"int{bits}", True, dtype, CPU, None)


def llama(layers: int, hidden: int) -> Any:
    torch.manual_seed(0)
    ffn = 64 * round(hidden * 8 / 3 / 64)
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, intermediate_size=ffn, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape)


def measured(ours: Decoder, theirs: Any, batch: int, turns: int) -> dict[str, float]:
    """Time both in turns; rates in tokens a second."""
    prompts = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    requests = [Request(row, 0) for row in prompts.tolist()]
    settings = BatchSettings(NEW, texts=batch, cache_bytes=1 << 28)

    def our_turn() -> None:
        texts = list(generate_batch(ours, requests, GREEDY, settings, VOCABULARY))
        assert sum(len(text.tokens) for text in texts) == batch * NEW

    def their_turn() -> None:
        with torch.inference_mode():
            made = theirs.generate(prompts, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0)
        assert made.shape == (batch, PROMPT + NEW)

    pairs = [(seconds(our_turn), seconds(their_turn)) for _ in range(turns + 1)][1:]
    ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in pairs)
    low, high = interval(ratios)
    ours_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    sizes = {name: p.nbytes for name, p in ours.named_parameters()}
    sizes |= {name: held.data.nbytes for name, held in ours.quantised.items()}
    weights = sum(sizes.values()) - sizes["embedding.weight"]
    return {
        "bytes": sum(sizes.values()), "batch": batch, "ours": batch * NEW / ours_s, "theirs": batch * NEW / theirs_s,
        "ratio": statistics.median(ratios), "low": low, "high": high, "bound": batch * read_rate() / weights,
    }  # fmt: skip


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics that hold the median with 95 %, or the ends if there are too few."""
    n = len(ordered)
    skipped = max(int(n / 2 - 0.98 * n**0.5), 0)
    return ordered[skipped], ordered[n - 1 - skipped]


def read_rate() -> float:
    """Return bytes a second of reading memory with all threads, the best of five."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(seconds(x.sum) for _ in range(5))


def seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
