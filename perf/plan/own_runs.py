"""Our own runs on this machine, predicted by the planner and then run: own_runs.md, own_runs.json.

    python perf/plan/own_runs.py STORE [local] [cluster] | again

    for as many ranks as a run has    perf step --calibrate  -->  plan --calibrate  -->  own_machine_*.toml
    for each run                      predict  -->  train, a few steps  -->  what its log says

Calibration measures kernels and links, never a step, and nothing is fitted to a run. `local`: one rank and two ranks
with one thread each; `cluster`: two hosts of cluster.sh, 1 Gbit/s each way (needs root). Without words: both, about
eight minutes on a machine that has nothing else to do. `again` predicts the runs of own_runs.json anew, from the
calibrations of that time: to see what a change of the planner does. HPCLLM_LAUNCH starts ranks, "mpiexec -n" if it is
not set. Seconds are medians of all steps but the first few; memory is that of tensors, the most of any stage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpcllm.data.store import read_header
from hpcllm.plan.layouts import Layout, parse_layout
from hpcllm.plan.memory.predict import layout_memory
from hpcllm.plan.models import read_model
from hpcllm.plan.prediction import predict
from hpcllm.plan.time.calibration import machine_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLUSTER = ROOT / "perf" / "cluster.sh"
WARM_UP_STEPS = 3
MODELS = {  # name: (shape without its vocabulary, tokens of a sample, samples of a step, steps that count)
    "tiny": ({"preset": "tiny"}, 128, 32, 12),
    "30M": ({"preset": "tiny", "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408}, 256, 4, 5),
}
LOCAL = [
    "dp=1,micro_batch=ALL",
    "dp=2,micro_batch=HALF",
    "dp=2,micro_batch=HALF,shard=states",
    "dp=2,micro_batch=HALF,shard=states+gradients",
    "dp=2,micro_batch=HALF,shard=all",
    "dp=2,micro_batch=HALF,recompute=full",
    "dp=2,micro_batch=HALF,policy=hpcllm",
    "tp=2,micro_batch=ALL",
    "tp=2,micro_batch=ALL,sequence_parallel=true",
    "pp=2,micro_batch=QUARTER",
    "pp=2,micro_batch=QUARTER,schedule=zb-h1",
]
BETWEEN_HOSTS = [
    "dp=2,micro_batch=HALF",
    "dp=2,micro_batch=HALF,shard=states",
    "dp=2,micro_batch=HALF,policy=hpcllm",
    "tp=2,micro_batch=ALL",
    "pp=2,micro_batch=QUARTER",
    "pp=2,micro_batch=QUARTER,policy=hpcllm",
]


@dataclass(frozen=True)
class Place:
    """Where ranks run, and how they are started there."""

    name: str
    ranks: int
    launch: tuple[str, ...]

    @property
    def machine(self) -> Path:
        return HERE / f"own_machine_{self.name.replace(' ', '_')}.toml"

    def start(self, *words: str) -> None:
        """Raises SystemExit with what the program said if it failed."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*self.launch, "python", *words], env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            sys.exit(f"{self.name}: {' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")

    def calibrate(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.json"
            self.start("-m", "hpcllm.perf", "step", "--calibrate", "--json", str(results))
            self.machine.write_text(machine_text([results]), encoding="utf-8")


@dataclass(frozen=True)
class Run:
    model: str
    place: Place
    text: str  # of the layout

    @property
    def layout(self) -> Layout:
        samples = MODELS[self.model][2]
        text = self.text
        for word, parts in (("ALL", 1), ("HALF", 2), ("QUARTER", 4)):
            text = text.replace(f"micro_batch={word}", f"micro_batch={samples // parts}")
        return parse_layout(f"trainer=hpcllm,precision=fp32,{text}")

    def predicted(self, vocabulary: int) -> tuple[Any, float]:
        """The prediction, and bytes of the fullest stage's tensors."""
        shape, sequence, samples, _ = MODELS[self.model]
        model = read_model({**shape, "vocabulary": vocabulary, "sequence_length": sequence})
        memory = max(
            rank.states + rank.activations + rank.buffers for rank in layout_memory(model, self.layout, samples)
        )
        return predict(self.place.machine, model, self.layout, samples), memory

    def settings(self, store: Path, folder: str) -> Iterator[str]:
        shape, sequence, samples, steps = MODELS[self.model]
        layout = self.layout
        keys: dict[str, Any] = {f"model.{key}": value for key, value in shape.items()}
        keys |= {"data.store": str(store), "data.sequence_length": sequence, "data.global_batch": samples}
        keys |= {"data.validation_sequences": 1, "run.folder": folder, "run.name": "run"}
        keys |= {"run.steps": steps + WARM_UP_STEPS, "mesh.dp": layout.dp, "mesh.pp": layout.pp, "mesh.tp": layout.tp}
        keys |= {"mesh.sequence_parallel": layout.sequence_parallel, "pipeline.schedule": layout.schedule}
        keys |= {"pipeline.microbatches": layout.microbatches(samples), "pipeline.recompute": layout.recompute}
        keys |= {"optimizer.shard": layout.shard, "communication.policy": layout.policy}
        keys |= {"communication.exact_steps": 0, "communication.hash_every_steps": 0}
        keys |= {"log.every_steps": 1, "log.trackers": [], "checkpoint.every_steps": 0}
        return (f"--set={key}={json.dumps(value)}" for key, value in keys.items())

    def measured(self, store: Path) -> tuple[list[float], float]:
        """Seconds of steps, and bytes of the fullest stage's tensors, as the run's log says."""
        with tempfile.TemporaryDirectory() as folder:
            run_file = str(ROOT / "jobscripts" / "local" / "tiny.toml")
            self.place.start("-m", "hpcllm", "train", run_file, *self.settings(store, folder))
            lines = (Path(folder) / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        seconds = [record["step_s"] for record in records if "step_s" in record]
        stages = next(record["memory_stages"] for record in records if "memory_stages" in record)
        return seconds[WARM_UP_STEPS:], max(map(_bytes, stages))

    def record(self, store: Path, vocabulary: int) -> dict[str, Any]:
        seconds, measured_bytes = self.measured(store)
        measured = {"measured_s": median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds)}
        return self.beside(measured | {"measured_bytes": measured_bytes}, vocabulary)

    def beside(self, measured: dict[str, Any], vocabulary: int) -> dict[str, Any]:
        """What was measured, and what is predicted."""
        prediction, predicted_bytes = self.predicted(vocabulary)
        split = ("compute_s", "tp_s", "pp_s", "bubble_s", "dp_exposed_s", "optimizer_s")
        return {
            "place": self.place.name,
            "model": self.model,
            "layout": self.layout.text(),
            **{key: measured[key] for key in ("measured_s", "fastest_s", "slowest_s", "measured_bytes")},
            "predicted_s": prediction.iteration_time_s,
            **{key: getattr(prediction, key) for key in split},
            "error": prediction.iteration_time_s / measured["measured_s"] - 1,
            "predicted_bytes": predicted_bytes,
            "memory_error": predicted_bytes / measured["measured_bytes"] - 1,
        }


def _bytes(stage: dict[str, int]) -> float:
    return sum(size for key, size in stage.items() if key.endswith("_bytes") and not key.endswith("_predicted_bytes"))


def local() -> list[Run]:
    launch = os.environ.get("HPCLLM_LAUNCH", "mpiexec -n").split()
    one, two = (Place(f"{ranks} rank{'s' * (ranks > 1)}", ranks, (*launch, str(ranks))) for ranks in (1, 2))
    return [Run(model, one if text.startswith("dp=1") else two, text) for model in MODELS for text in LOCAL]


def cluster() -> list[Run]:
    place = Place("2 hosts", 2, ("bash", str(CLUSTER), "run", "-n", "2"))
    return [Run(model, place, text) for model in MODELS for text in BETWEEN_HOSTS]


def table(records: list[dict[str, Any]]) -> str:
    titles = ["where", "model", "layout", "step, s", "fastest", "predicted", "error"]
    titles += ["tensors, MB", "predicted", "error"]
    lines = [f"| {' | '.join(titles)} |", f"|---|---|---|{'---:|' * 7}"]
    for r in records:
        times = f"{r['measured_s']:.3f} | {r['fastest_s']:.3f} | {r['predicted_s']:.3f} | {100 * r['error']:+.0f} %"
        sizes = f"{r['measured_bytes'] / 1e6:.1f} | {r['predicted_bytes'] / 1e6:.1f} | {100 * r['memory_error']:+.1f} %"
        layout = r["layout"].replace("precision=fp32,", "").replace("trainer=hpcllm", "").strip(",")
        lines.append(f"| {r['place']} | {r['model']} | {layout} | {times} | {sizes} |")
    errors = {key: sorted(abs(r[key]) for r in records) for key in ("error", "memory_error")}
    time_s, memory = errors["error"], errors["memory_error"]
    within = sum(error <= 0.15 for error in time_s)
    lines += [
        "",
        f"Step time: median error {100 * median(time_s):.1f} %, worst {100 * time_s[-1]:.1f} %, {within} of "
        f"{len(time_s)} within 15 %. Memory: median {100 * median(memory):.2f} %, worst {100 * memory[-1]:.2f} %.",
    ]
    return "\n".join(lines)


def measure(runs: list[Run], store: Path, vocabulary: int) -> list[dict[str, Any]]:
    for place in dict.fromkeys(run.place for run in runs):
        print(f"calibrate: {place.name}", file=sys.stderr, flush=True)
        place.calibrate()
    records = []
    for run in runs:
        record = run.record(store, vocabulary)
        line = f"{record['measured_s']:.3f} s, predicted {record['predicted_s']:.3f} ({100 * record['error']:+.0f} %)"
        print(f"{run.place.name}, {run.model}, {run.text}: {line}", file=sys.stderr, flush=True)
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("parts", nargs="*", choices=["local", "cluster", "again", []], default=["local", "cluster"])
    arguments = parser.parse_args()
    store, path = arguments.store.resolve(), HERE / "own_runs.json"
    vocabulary = read_header(store).vocabulary
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    places = {"local": ("1 rank", "2 ranks"), "cluster": ("2 hosts",)}
    kept = [r for r in old if not any(r["place"] in places.get(part, ()) for part in arguments.parts)]
    records = []
    if "local" in arguments.parts:
        records += measure(local(), store, vocabulary)
    records += [r for r in kept if r["place"] in places["local"]]
    if "cluster" in arguments.parts:
        subprocess.run(["bash", str(CLUSTER), "up", "2", "1gbit"], check=True)
        try:
            records += measure(cluster(), store, vocabulary)
        finally:
            subprocess.run(["bash", str(CLUSTER), "down"], check=True)
    records += [r for r in kept if r["place"] in places["cluster"]]
    if "again" in arguments.parts:
        runs = {(run.place.name, run.model, run.layout.text()): run for run in (*local(), *cluster())}
        records = [runs[r["place"], r["model"], r["layout"]].beside(r, vocabulary) for r in old]
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    head = f"Made by own_runs.py: {os.cpu_count()} cores, a thread a rank; tiny: 32 x 128 tokens a step, 30M: 4 x 256."
    (HERE / "own_runs.md").write_text(f"{head}\n\n{table(records)}\n", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
