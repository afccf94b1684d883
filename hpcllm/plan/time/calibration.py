"""Make a machine file, which --machine reads, of measurements in an allocation. Pure.

    results.json, of `perf step --calibrate`    kernels, links, where and when --+
    tuning.toml, of `perf tune`                 the links of a larger job -------+--> my-machine.toml

A file of `tune` takes the place of the links that came with the kernels: one rank, or one node, is enough for those.
Everything in the file was measured; values that no rank can measure, such as power, are left out, and usual ones hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcllm.collectives.tuning import Tuning, from_tables, load_tuning, to_text
from hpcllm.config.input_files import LARGEST_TABLE_BYTES, read_text
from hpcllm.config.machines import peak_of_device
from hpcllm.errors import ConfigError
from hpcllm.plan.time.kernel_times import MeasuredKernels, read_measured_kernels

TEXTS = ("machine", "date", "library", "torch", "device", "kind")
COUNTS = ("ranks", "nodes", "ranks_per_node", "threads", "memory_gb")
FAMILIES_OF = {  # pattern of a GPU's name -> key of roofline.FAMILIES
    "MI250|MI210": "amd-cdna2",
    "MI300|MI325": "amd-cdna3",
    "H100|H200|GH200|H800": "nvidia-hopper",
    "A100|A800": "nvidia-ampere",
    "V100": "nvidia-volta",
    "Max|PVC": "intel-xe",
}
LINE = 110  # characters


def machine_text(paths: Sequence[Path]) -> str:
    """Write a machine file of one results file and any number of tuning files, the last of which counts.

    Raises ConfigError, with file, key and value.
    """
    results = [path for path in paths if path.suffix != ".toml"]
    if len(results) != 1:
        raise ConfigError(
            f"--calibrate {' '.join(map(str, paths))}: {len(results)} results files; valid: one, written by "
            "`python -m hpcllm.perf step --calibrate --json`, and with it a tuning.toml of `python -m hpcllm.perf tune`"
        )
    try:
        measured, kernels, tuning = _read(results[0])
    except ConfigError as error:
        raise ConfigError(f"results file {str(results[0])!r}: {error}") from error
    for path in paths:
        if path.suffix == ".toml":
            tuning = load_tuning(path)
    return "\n".join([*_device(measured, kernels), *_links(tuning), *_kernels(kernels)]) + "\n"


def _read(path: Path) -> tuple[dict[str, Any], MeasuredKernels, Tuning]:
    tables = _tables(path)
    for key in ("measured", "kernels", "tuning"):
        if not isinstance(tables.get(key), dict):
            raise ConfigError(f"{key} = {str(tables.get(key))[:60]!r} should be a table")
    facts = tables["measured"]
    for key in TEXTS:
        if type(facts.get(key)) is not str:
            raise ConfigError(f"measured.{key} = {facts.get(key)!r} should be a text")
    for key in COUNTS:
        value: Any = facts.get(key)
        if not (type(value) is int or (type(value) is float and key == "memory_gb")) or not 0 < value < 1e9:
            raise ConfigError(f"measured.{key} = {value!r} should be a number above 0")
    kernels = read_measured_kernels(tables["kernels"])
    if not kernels.types:
        raise ConfigError("kernels = {} has no precision; valid: fp32, bf16, fp16, at least one")
    return facts, kernels, from_tables(tables["tuning"])


def _tables(path: Path) -> dict[str, Any]:
    try:
        tables = json.loads(read_text(path, LARGEST_TABLE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}; `python -m hpcllm.perf step --calibrate` writes one") from error
    if not isinstance(tables, dict):
        raise ConfigError("holds no table")
    return tables


def _device(facts: dict[str, Any], kernels: MeasuredKernels) -> list[str]:
    """Write the head and [device]; of a CPU a rank's share, whose peak is not known: the best product stands for it."""
    times = next(times for name in ("bf16", "fp16", "fp32") if (times := kernels.types.get(name)))
    best = max(max(grid.values) for grid in times.products.values())
    on_cpu, sums = facts["kind"] == "cpu", times.curves["accumulate"]
    peak = None if on_cpu else peak_of_device(facts["device"])
    families = (family for words, family in FAMILIES_OF.items() if re.search(words, facts["device"]))
    return [
        f"# Measured on {facts['machine']}, {facts['date']}: {facts['ranks']} ranks on {facts['nodes']} nodes, "
        f"{facts['threads']} threads each, PyTorch {facts['torch']}, {facts['library']}.",
        "# Made by `python -m hpcllm plan --calibrate`. GB = 1e9 bytes; rates are of a rank, all of its node at work.",
        f"name = {_text(facts['machine'])}",
        "",
        "[device]",
        f"name = {_text(facts['device'])}",
        f"family = {_text('cpu' if on_cpu else next(families, 'other'))}",
        f"per_node = {facts['ranks_per_node']} # ranks that were at work together",
        f"memory_gb = {facts['memory_gb']:.4g}",
        f"hbm_gb_s = {12.0 * sums.sizes[-1] / sums.seconds[-1] / 1e9:.4g} # of a sum of two long arrays",
        f"peak_bf16_tflops = {peak or best:.4g} # {'of the data sheet' if peak else 'of the best product, not a peak'}",
        f"gemm_bf16_tflops = {best:.4g} # of the best product",
    ]


def _links(tuning: Tuning) -> list[str]:
    """Write [links] and [network]: rates are what MPI measured, so shares of them are 1."""
    near, far = tuning.rates.near, tuning.rates.far
    lines = ["", "[links]", *(f"{key} = {near.bandwidth_gb_s:.4g}" for key in ("pair_gb_s", "package_gb_s"))]
    lines += [f"device_gb_s = {near.bandwidth_gb_s:.4g}", "message_share = 1.0"]
    lines += [f"collective_gb_s = {near.bandwidth_gb_s:.4g}", f"latency_s = {near.latency_s:.3e}"]
    lines += ["", "[network]", 'nic = "all of a node together"', "nics_per_node = 1"]
    lines += [f"nic_gb_s = {far.bandwidth_gb_s:.4g}", f"latency_s = {far.latency_s:.3e}"]
    lines += ["mpi_share = 1.0", "message_share = 1.0", "collective_share = 1.0"]
    tables = to_text(tuning).splitlines()[1:]
    return lines + [line.replace("[", "[tuning.", 1) if line.startswith("[") else line for line in tables]


def _kernels(kernels: MeasuredKernels) -> Iterator[str]:
    words = "TFLOP/s of m x n x k products, sizes all with all; seconds of a head of attention; of others by values"
    yield from ("", f"# {words}")
    for name, times in kernels.types.items():
        products = {"sizes": times.products["forward"].axes[0]}
        products |= {key: grid.values for key, grid in times.products.items()}
        yield from _table(f"kernels.{name}.products", products)
        sequence, channels = times.attention["forward"].axes
        attention = {"sequence": sequence, "channels": channels}
        attention |= {key: grid.values for key, grid in times.attention.items()}
        yield from _table(f"kernels.{name}.attention", attention)
        for key, curve in times.curves.items():
            yield from _table(f"kernels.{name}.curves.{key}", {"sizes": curve.sizes, "seconds": curve.seconds})


def _table(title: str, lists: dict[str, tuple[float, ...]]) -> Iterator[str]:
    yield from ("", f"[{title}]")
    for key, numbers in lists.items():
        words = [f"{number:.4g}" for number in numbers]
        each = max(1, LINE // (max(map(len, words)) + 2))
        rows = [", ".join(words[at : at + each]) for at in range(0, len(words), each)]
        yield f"{key} = [{rows[0]}]" if len(rows) == 1 else f"{key} = [\n    " + ",\n    ".join(rows) + ",\n]"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
