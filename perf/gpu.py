"""The parts of gpu.sh: each puts its records into gpu.json beside this file. See gpu.sh.

checks     tests/gpu and tools on it: what failed and why, kernels of attention, versions; see gpu_checks.py
codecs     N calls handed to the device at once, then one wait: launch gaps count where they are not hidden
mfu        python -m hpcllm train, alone; median of its own log, the first steps left out
shared     python -m hpcllm.perf step, policies in turns
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_checks
import torch
from gpu_report import summary

from hpcllm.codecs import find_codec
from hpcllm.config.schema import load
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.errors import ConfigError
from hpcllm.plan.memory.predict import predict
from hpcllm.plan.resolve import resolve
from hpcllm.system.device import choose_device, device_facts, synchronize

HERE = Path(__file__).resolve().parent
CODECS = ("bf16", "fp16", "int8:256", "int8:256:sr", "int4:128", "fp8:128", "exp", "mpc", "zfp:8", "zfp:16")
ROUNDS, CALLS = 9, 10
FILL = 0.85  # of the device's memory, by prediction: the rest is for kernels' workspaces and fragments
WARM_UP_STEPS = 5


def checks(device: torch.device, _options: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"versions": gpu_checks.versions(device)}, *gpu_checks.checks(launched)]


def codecs(device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(options.bytes // dtype.itemsize).to(dtype).to(device)
        decoded = torch.empty_like(values)
        copy_s = seconds(device, lambda: decoded.copy_(values))  # noqa: B023 -- called at once
        copied = 2 * values.nbytes / copy_s
        for name in CODECS:
            try:
                codec = find_codec(name, dtype, device.type)
            except ValueError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if codec.name == str(dtype).removeprefix("torch."):
                continue
            out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=device)
            data = codec.encode(values, out)
            moved = values.nbytes + data.nbytes
            ways = {
                "encode": lambda: codec.encode(values, out),  # noqa: B023
                "decode": lambda: codec.decode(data, decoded),  # noqa: B023
            }
            for way, call in ways.items():
                rate = moved / seconds(device, call)
                record = {"codec": name, "dtype": str(dtype).removeprefix("torch."), "way": way, "bytes": values.nbytes}
                records.append({**record, "moved_gb_s": rate / 1e9, "copy_gb_s": copied / 1e9, "share": rate / copied})
                print(f"{name} {way} of {dtype}: {rate / 1e9:.0f} GB/s, {100 * rate / copied:.0f} % of a copy")
    return records


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Of one call: the median of some rounds of calls that are handed to the device at once."""
    found = []
    for number in range(ROUNDS + 2):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        synchronize(device)
        found += [(time.perf_counter() - start) / CALLS] if number > 1 else []
    return statistics.median(found)


def mfu(device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        store = made_store(Path(folder))
        for recompute in ("none", "selective"):
            keys = {
                **run_keys(Path(folder), store, f"mfu {recompute}", options),
                "run.machine": options.machine,
                "data.global_batch": options.batch,
                "precision.compute": "bf16",
                "pipeline.recompute": recompute,
                "log.every_steps": 1,
            }
            keys["pipeline.microbatches"], predicted = fitting(Path(folder), keys, device_facts(device).memory_bytes)
            command = [sys.executable, "-m", "hpcllm", "train", str(Path(folder) / "run.toml"), *as_options(keys)]
            subprocess.run(launched(1, command), check=True, stdout=sys.stderr)
            log = Path(folder) / keys["run.name"] / "log.jsonl"
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            record = {"preset": options.preset, "sequence": options.sequence}
            records.append(record | of_a_run(keys, predicted, lines))
            print(json.dumps(records[-1]))
    return records


def fitting(folder: Path, keys: dict[str, Any], memory_bytes: int) -> tuple[int, int]:
    """The fewest microbatches that fit into the device's memory by prediction, and what is predicted then, in bytes."""
    (folder / "run.toml").write_text("")
    batch = keys["data.global_batch"]
    for microbatches in (count for count in range(1, batch + 1) if batch % count == 0):
        settings = as_settings({**keys, "pipeline.microbatches": microbatches})
        resolved = resolve(load(folder / "run.toml", settings), 1)
        config, schedule = resolved.config, resolved.schedule
        memory = predict(config, schedule, 0)
        need = memory.total - memory.checkpoint  # which lies in the host's memory
        if need < FILL * memory_bytes or not memory_bytes:
            return microbatches, need
    raise SystemExit(f"{keys['model.preset']} needs {need / 1e9:.0f} GB, the device has {memory_bytes / 1e9:.0f} GB")


def of_a_run(keys: dict[str, Any], predicted: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [line for line in lines if "step_s" in line][WARM_UP_STEPS:]
    record = {
        "recompute": keys["pipeline.recompute"],
        "samples_a_microbatch": keys["data.global_batch"] // keys["pipeline.microbatches"],
        "samples_a_step": keys["data.global_batch"],
        "step_s": statistics.median(step["step_s"] for step in steps),
        "memory_gb": max(step["memory_gb"] for step in steps),
        "predicted_gb": predicted / 1e9,
        "loss": steps[-1]["loss"],
    }
    for key in ("tokens_per_s", "tflops_per_device", "mfu"):
        if key in steps[0]:
            record[key] = statistics.median(step[key] for step in steps)
    return record


def shared(_device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        store = made_store(Path(folder))
        (Path(folder) / "run.toml").write_text("")
        for ranks in (1, 2, 4):
            keys = {
                **run_keys(Path(folder), store, "shared", options),
                "data.global_batch": options.batch,
                "precision.compute": "bf16",
                "communication.gpu_aware": "no",
            }
            out = Path(folder) / f"{ranks}.json"
            command = [sys.executable, "-m", "hpcllm.perf", "step", str(Path(folder) / "run.toml"), *as_options(keys)]
            command += ["--policies", "none,hpcllm", "--steps", str(options.steps), "--json", str(out)]
            subprocess.run(launched(ranks, command), check=True, stdout=sys.stderr)
            records += [{**r, "preset": options.preset} for r in json.loads(out.read_text(encoding="utf-8"))]
    return records


def run_keys(folder: Path, store: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "run.name": name,
        "run.folder": str(folder),
        "run.steps": options.steps + WARM_UP_STEPS,
        "run.device": "gpu",
        "model.preset": options.preset,
        "model.max_sequence": options.sequence,
        "data.store": str(store),
        "data.sequence_length": options.sequence,
        "data.validation_sequences": 1,
        "log.trackers": [],
        "checkpoint.every_steps": 0,
    }


def made_store(folder: Path) -> Path:
    """Of the source of Python's standard library."""
    from mpi4py import MPI

    prepare(PrepareOptions(inputs=(), output=folder / "store.h5", vocabulary=4096), MPI.COMM_SELF)
    return folder / "store.h5"


def as_settings(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def as_options(keys: dict[str, Any]) -> list[str]:
    return [f"--set={setting}" for setting in as_settings(keys)]


def launched(ranks: int, command: list[str]) -> list[str]:
    return [*shlex.split(os.environ.get("HPCLLM_LAUNCH", "mpirun -n")), str(ranks), *command]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("checks", "codecs", "mfu", "shared", "summary"))
    parser.add_argument("--folder", type=Path, default=HERE, help="of gpu.json and gpu.md (default: beside this file)")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="codecs: of an array (default: 256 MiB)")
    parser.add_argument("--preset", help="the model (default: llama-1b, shared: gpt2-124m)")
    parser.add_argument("--sequence", type=int, help="tokens of a sample (default: 4096, shared: 1024)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step (default: 16)")
    parser.add_argument("--steps", type=int, default=15, help="that are timed (default: 15)")
    parser.add_argument("--machine", default="", help="mfu: run.machine, if the device's name tells no peak")
    options = parser.parse_args()
    preset, sequence = ("gpt2-124m", 1024) if options.part == "shared" else ("llama-1b", 4096)
    options.preset, options.sequence = options.preset or preset, options.sequence or sequence
    path = options.folder / "gpu.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.part == "summary":
        (options.folder / "gpu.md").write_text(summary(results), encoding="utf-8")
        return
    try:
        device = choose_device("gpu")
    except ConfigError as error:
        sys.exit(f"perf/gpu.sh: no GPU, so nothing is measured: {error}")
    where = {"device": device_facts(device).text, "torch": f"PyTorch {torch.__version__}"}
    if results.get("where", where) != where:
        sys.exit(f"{path} is of {results['where']}, this is {where}: move it away first")
    part = {"checks": checks, "codecs": codecs, "mfu": mfu, "shared": shared}[options.part]
    results |= {"where": where, options.part: part(device, options)}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
