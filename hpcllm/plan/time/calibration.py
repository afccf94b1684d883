"""Make a machine file, which --machine reads, of measurements in an allocation. Pure.

    results.json, of `perf step --calibrate`    kernels, links, where and when --+
    tuning.toml, of `perf tune`                 the links of a larger job -------+--> my-machine.toml

A file of `tune` takes the place of the links that came with the kernels: one rank, or one node, is enough for those.
Everything in the file was measured; values that no rank can measure, such as power, are left out, and usual ones hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcllm.collectives.tuning import Tuning, from_tables, load_tuning, to_text
from hpcllm.config.machines import peak_of_device
from hpcllm.errors import ConfigError
from hpcllm.plan.time.kernel_times import KernelTimes, MeasuredKernels, read_measured_kernels

FACTS: dict[str, tuple[type, ...]] = {
    "machine": (str,),
    "date": (str,),
    "library": (str,),
    "torch": (str,),
    "device": (str,),
    "kind": (str,),
    "ranks": (int,),
    "nodes": (int,),
    "ranks_per_node": (int,),
    "threads": (int,),
    "memory_gb": (int, float),
}
FAMILIES_OF = (  # words of a GPU's name -> key of roofline.FAMILIES
    (("MI250", "MI210"), "amd-cdna2"),
    (("MI300", "MI325"), "amd-cdna3"),
    (("H100", "H200", "GH200", "H800"), "nvidia-hopper"),
    (("A100", "A800"), "nvidia-ampere"),
    (("V100",), "nvidia-volta"),
    (("Max", "PVC"), "intel-xe"),
)
LARGEST_FILE_BYTES = 16 << 20
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
    return "\n".join([*_head(measured), *_device(measured, kernels), *_links(tuning), *_kernels(kernels)]) + "\n"


def _read(path: Path) -> tuple[dict[str, Any], MeasuredKernels, Tuning]:
    tables = _tables(path)
    for key in ("measured", "kernels", "tuning"):
        if not isinstance(tables.get(key), dict):
            raise ConfigError(f"{key} = {str(tables.get(key))[:60]!r} should be a table")
    facts = tables["measured"]
    for key, kinds in FACTS.items():
        value = facts.get(key)
        if type(value) not in kinds or (not isinstance(value, str) and not 0 < value < 1e9):
            raise ConfigError(f"measured.{key} = {value!r} should be {_kind(kinds)}")
    kernels = read_measured_kernels(tables["kernels"])
    if not kernels.types:
        raise ConfigError("kernels = {} has no precision; valid: fp32, bf16, fp16, at least one")
    return facts, kernels, from_tables(tables["tuning"])


def _kind(kinds: tuple[type, ...]) -> str:
    return "a text" if kinds == (str,) else "a number above 0"


def _tables(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise ValueError(f"more than {LARGEST_FILE_BYTES} bytes")
        tables = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}; `python -m hpcllm.perf step --calibrate` writes one") from error
    if not isinstance(tables, dict):
        raise ConfigError("holds no table")
    return tables


def _head(facts: dict[str, Any]) -> list[str]:
    return [
        f"# Measured on {facts['machine']}, {facts['date']}: {facts['ranks']} ranks on {facts['nodes']} nodes, "
        f"{facts['threads']} threads each, PyTorch {facts['torch']}, {facts['library']}.",
        "# Made by `python -m hpcllm plan --calibrate`. GB = 1e9 bytes; rates are of a rank, all of its node at work.",
        f"name = {_text(facts['machine'])}",
    ]


def _device(facts: dict[str, Any], kernels: MeasuredKernels) -> list[str]:
    """Write [device]; of a CPU a rank's share, whose peak is not known: the best product stands for it."""
    times = next(times for name in ("bf16", "fp16", "fp32") if (times := kernels.types.get(name)))
    best = max(max(grid.values) for grid in times.products.values())
    peak = peak_of_device(facts["device"]) if facts["kind"] != "cpu" else None
    return [
        "",
        "[device]",
        f"name = {_text(facts['device'])}",
        f"family = {_text('cpu' if facts['kind'] == 'cpu' else _family(facts['device']))}",
        f"per_node = {facts['ranks_per_node']} # ranks that were at work together",
        f"memory_gb = {facts['memory_gb']:.4g}",
        f"hbm_gb_s = {_memory_gb_s(times):.4g} # of a sum of two long arrays",
        f"peak_bf16_tflops = {peak or best:.4g} # {'of the data sheet' if peak else 'of the best product, not a peak'}",
        f"gemm_bf16_tflops = {best:.4g} # of the best product",
    ]


def _family(name: str) -> str:
    """Return the family of a GPU by the name that its driver gives."""
    return next((family for words, family in FAMILIES_OF if any(word in name for word in words)), "other")


def _memory_gb_s(times: KernelTimes) -> float:
    curve = times.curves["accumulate"]
    return 12.0 * curve.sizes[-1] / curve.seconds[-1] / 1e9


def _links(tuning: Tuning) -> list[str]:
    """Write [links] and [network]: rates are what MPI measured, so shares of them are 1."""
    rates = tuning.rates
    near, far = rates.near, rates.far
    lines = ["", "[links]", *(f"{key} = {near.bandwidth_gb_s:.4g}" for key in ("pair_gb_s", "package_gb_s"))]
    lines += [f"device_gb_s = {near.bandwidth_gb_s:.4g}", "message_share = 1.0"]
    lines += [f"collective_gb_s = {near.bandwidth_gb_s:.4g}", f"latency_s = {near.latency_s:.3e}"]
    lines += ["", "[network]", 'nic = "all of a node together"', "nics_per_node = 1"]
    lines += [f"nic_gb_s = {far.bandwidth_gb_s:.4g}", f"latency_s = {far.latency_s:.3e}"]
    lines += ["mpi_share = 1.0", "message_share = 1.0", "collective_share = 1.0"]
    tables = to_text(tuning).splitlines()[1:]
    return lines + [line.replace("[", "[tuning.", 1) if line.startswith("[") else line for line in tables]


def _kernels(kernels: MeasuredKernels) -> Iterator[str]:
    yield from (
        "",
        "# TFLOP/s of m x n x k products, sizes all with all; seconds of a head of attention; of others by values",
    )
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
