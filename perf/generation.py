"""Tokens a second of generated text, beside `generate` of transformers with the same weights and threads.

    python perf/generation.py perf/generation.json [--threads N] [--turns N] [--models 26m ...] > perf/generation.md

Random weights of a Llama, which all load from one folder; prompts of 32 tokens, 64 new ones, the likeliest each. A turn
runs ours, in each form of its weights, and transformers in each of its ways, one after the other: with sdpa attention,
its default; with eager attention; and with forward compiled by torch.compile over a static cache. A row is ours beside
the way whose median is best; a turn's ratio is theirs over ours in seconds, and its interval is that of the median (the
order statistics that hold it with 95 %). The bound: bytes of all weights but the embedding, read once a pass, over the
rate at which this machine reads memory, measured beside it. Rows of 8 and 4 bits are ours beside theirs in fp32:
transformers has no such weights on CPUs without another library. MB: of all weights, as ours are held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from hpcllm.checkpoint.huggingface.quantise import quantise
from hpcllm.inference.batch import Request
from hpcllm.inference.complete import BatchSettings, generate_batch
from hpcllm.inference.generate import load_model
from hpcllm.model.initialisation import CPU
from hpcllm.model.sampling import Sampling
from hpcllm.model.transformer import Decoder
from hpcllm.system.hardware.node import find_hardware, multiplies
from hpcllm.system.output import say, write_whole

T = TypeVar("T")
PROMPT, NEW, VOCABULARY = 32, 64, 8192
MODELS = {"26m": (8, 512), "125m": (12, 896)}  # layers, hidden
GREEDY = Sampling(temperature=0.0)
WAYS = ("sdpa", "eager", "compiled")
HEAD = """# Generating text beside transformers

Made by `generation.py`: prompts of 32 tokens, 64 new ones each, the likeliest; random weights of a Llama, the same for
all. Machine: {processor}, {cores} cores, {threads} threads; torch {torch}, transformers {transformers}.
Tokens a second are medians. ratio: ours over `generate` of transformers in its best way, in turns, with the interval of
its median. Rows of int8 and int4 are beside transformers in fp32. bound: as if a pass took as long as reading all
weights once. others: share of the cores that other processes had. Of {rows} rows {slower} are slower, in bold.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json", help="rows that it has are kept, others are added")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="none: the table alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    rows = json.loads(arguments.rows.read_text(encoding="utf-8")) if arguments.rows.exists() else []
    for name in arguments.models:
        for found in rows_of(name, arguments.turns, {(row["model"], row["type"], row["batch"]) for row in rows}):
            rows += found
            write_whole(arguments.rows, json.dumps(rows, indent=1) + "\n")
    slower = sum(row["high"] < 1 for row in rows)
    facts = {key: rows[-1][key] for key in ("threads", "cores", "processor", "torch", "transformers")}
    print(HEAD.format(rows=len(rows), slower=slower, **facts))
    say(markdown(rows), wide=True)


def markdown(rows: list[dict[str, Any]]) -> Iterator[str]:
    titles = ["model", "type", "MB", "texts", "ours", *WAYS, "ratio", "95 %", "bound", "others"]
    yield f"| {' | '.join(titles)} |"
    yield "|---|---|" + "---:|" * (len(titles) - 2)
    for row in rows:
        cells = [
            *(str(row[key]) for key in ("model", "type")),
            *(f"{row['bytes'] / 1e6:.1f}", str(row["batch"]), f"{row['ours']:.0f}"),
            *(f"{row['theirs'][way]:.0f}" for way in WAYS),
            "{0}{1:.2f}{0}".format("**" if row["high"] < 1 else "", row["ratio"]),
            *(f"{row['low']:.2f} to {row['high']:.2f}", f"{row['bound']:.0f}", f"{row['others_share']:.0%}"),
        ]
        yield f"| {' | '.join(cells)} |"


def rows_of(model: str, turns: int, known: set[tuple[str, str, int]]) -> Iterator[list[dict[str, Any]]]:
    """Measure what is not known of a model: yields the rows of a type and a number of texts, as they are measured."""
    dtypes = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if multiplies("bf16") else {})
    with tempfile.TemporaryDirectory() as folder:
        llama(*MODELS[model]).save_pretrained(folder)
        for precision, dtype in dtypes.items():
            load = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=dtype)
            theirs = {way: load(attn_implementation="eager" if way == "eager" else "sdpa").eval() for way in WAYS}
            theirs["compiled"].forward = torch.compile(theirs["compiled"].forward)
            ours = dict(models(Path(folder), precision, dtype))
            for batch in (1, 16):
                if all((model, held, batch) in known for held in ours):
                    continue
                facts = {"model": model, "batch": batch, "turns": turns} | of_machine()
                yield [facts | row for row in measured(ours, theirs, batch, turns)]


def of_machine() -> dict[str, Any]:
    return {
        "utc": time.strftime("%F %T", time.gmtime()), "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "processor": find_hardware().processor, "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


def with_others(work: Callable[[], T]) -> tuple[T, float]:
    """Return what work returns, and the share of all cores that other processes took meanwhile."""
    before, began_s = busy_ticks() - own_ticks(), time.perf_counter()
    found = work()
    ticks = (time.perf_counter() - began_s) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
    return found, max(0.0, (busy_ticks() - own_ticks() - before) / ticks)


def busy_ticks() -> float:
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return user + nice + system + irq + soft


def own_ticks() -> float:
    times = os.times()
    return (times.user + times.system) * os.sysconf("SC_CLK_TCK")


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


def measured(ours: dict[str, Decoder], theirs: dict[str, Any], batch: int, turns: int) -> list[dict[str, Any]]:
    """Time all in turns; rates in tokens a second."""
    prompts = torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    requests = [Request(row, 0) for row in prompts.tolist()]
    settings = BatchSettings(NEW, texts=batch, cache_bytes=1 << 28)

    def our_turn(model: Decoder) -> None:
        texts = list(generate_batch(model, requests, GREEDY, settings, VOCABULARY))
        assert sum(len(text.tokens) for text in texts) == batch * NEW

    def their_turn(way: str) -> None:
        cache = {"cache_implementation": "static"} if way == "compiled" else {}
        facts = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
        with torch.inference_mode():
            made = theirs[way].generate(prompts, **facts, **cache)
        assert made.shape == (batch, PROMPT + NEW)

    works = {held: partial(our_turn, model) for held, model in ours.items()}
    works |= {way: partial(their_turn, way) for way in theirs}
    for work in works.values():  # what is compiled, is compiled
        work()
        work()
    times, share = with_others(partial(times_of, works, turns))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(theirs, key=medians.__getitem__)
    rates = {name: batch * NEW / value for name, value in medians.items()}
    return [
        {"type": held, "ours": rates[held], "theirs": {way: rates[way] for way in theirs}, "others_share": share}
        | ratio_of(times[best], times[held])
        | bytes_and_bound(model, batch)
        for held, model in ours.items()
    ]


def times_of(works: Mapping[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


def ratio_of(theirs: list[float], ours: list[float]) -> dict[str, float]:
    ratios = sorted(their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True))
    low, high = interval(ratios)
    return {"ratio": statistics.median(ratios), "low": low, "high": high}


def bytes_and_bound(model: Decoder, batch: int) -> dict[str, float]:
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    sizes |= {name: held.data.nbytes for name, held in model.quantised.items()}
    weights = sum(sizes.values()) - sizes["embedding.weight"]
    return {"bytes": sum(sizes.values()), "bound": batch * read_rate() / weights}


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
