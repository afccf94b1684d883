"""Log of a run: one line a logged step, log.jsonl, trackers (trackers.py), a bar on a terminal.

Only rank 0 holds a Log. A resumed run first cuts log.jsonl back to the step it resumes from, so that a step is in
the file once. Lines that cannot be read are set aside: no log keeps a run from going on.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hpcllm.config.schema import Config
from hpcllm.errors import HpcllmError
from hpcllm.model.shapes import flops_per_token
from hpcllm.system.energy.account import taken_before
from hpcllm.system.json_lines import record_of
from hpcllm.system.output import COLUMNS, folded
from hpcllm.system.text import counted, fitted, harmless, printable
from hpcllm.training.trackers import PACKAGES, Tracker, open_tracker, tagged

Record = dict[str, Any]
KINDS = ("gradients", "parameters", "forward", "backward", "tensor")
# seconds waited, seconds of sums behind computing; then bytes sent by kind, before and after the codec
TRAFFIC = ("exposed_s", "hidden_s", *(f"{kind}_{what}" for kind in KINDS for what in ("plain_bytes", "bytes")))
Traffic = NDArray[np.float64]  # (len(TRAFFIC),)


@dataclass
class Log:
    """Writes records to files and lines to standard output."""

    file: Any
    bar: Any
    trackers: dict[str, Tracker] = field(default_factory=dict)
    run_file: str = ""  # its text, for trackers
    wide: bool = False  # lines as long as they are, else of 80 columns
    before: Record = field(default_factory=dict)  # hours, energy and cost at the end of the last start

    def step(self, record: Record) -> None:
        """Write one logged step everywhere. Raises HpcllmError where a file cannot be written."""
        self.write(record)
        if self.bar.disable:
            print(step_line(record, self.bar.total, 0 if self.wide else COLUMNS), flush=True)
        else:
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_s']:.0f} tokens/s", refresh=False)
            self.bar.update(record["step"] - self.bar.n)

    def validation(self, record: Record) -> None:
        """Write the result of a validation everywhere. Raises HpcllmError where a file cannot be written."""
        self.write(record)
        parts = [f"step {record['step']:>6}/{self.bar.total}", f"validation loss {record['validation_loss']:.4f}"]
        parts += [f"bits per byte {record['bits_per_byte']:.4f}"] if "bits_per_byte" in record else []
        self.print("  ".join([*parts, *_figure_parts(record, "validation_")]))

    def write(self, record: Record) -> None:
        """Write a record to the files and print nothing. Raises HpcllmError where a file cannot be written."""
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise HpcllmError(f"cannot write step {record['step']} to {self.file.name}: {error.strerror}") from error
        if "start" in record:
            self._track(lambda tracker: tracker.attach(self.run_file, record["start"]))
        if values := tagged(record):
            self._track(lambda tracker: tracker.log(record["step"], values))

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker; one that fails is told of once and left out from then on: training goes on."""
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # of any package
                del self.trackers[name]
                self.print(f"tracker {name} is left out from now on: {printable(f'{type(error).__name__}: {error}')}")

    def print(self, text: str) -> None:
        """Print a line for people, above the bar if there is one."""
        lines = [text] if self.wide else folded(text)
        self.bar.write(harmless("\n".join(lines)), file=sys.stdout)
        sys.stdout.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self._track(lambda tracker: tracker.close())
        with contextlib.suppress(OSError):  # each record was flushed; what failed then would only fail again
            self.file.close()


class TrafficCounter:
    """Counts the traffic of each step. read: returns the traffic of this rank so far."""

    def __init__(self, read: Callable[[], Traffic]) -> None:
        self.read, self._counted = read, read()

    def since_last(self) -> Traffic:
        """Return the traffic since the last call, without pauses."""
        before, self._counted = self._counted, self.read()
        return self._counted - before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out traffic that belongs to no step."""
        before = self.read()
        yield
        self._counted = self._counted + self.read() - before


@dataclass
class Pace:
    """Speed of the steps since the last logged one, and of all steps of this start."""

    config: Config
    ranks: int
    peak_tflops: float | None  # of one rank's device; None: unknown, so no MFU
    steps: int = 0
    seconds: float = 0.0
    targets: int = 0  # that count
    traffic: Traffic = field(default_factory=lambda: np.zeros(len(TRAFFIC)))  # summed over the ranks
    all_steps: int = 0
    all_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.global_batch * self.config.data.sequence_length

    @property
    def mean_tokens_per_s(self) -> float:
        return self.all_steps * self.tokens_per_step / self.all_seconds if self.all_steps else 0.0

    def add(self, step_s: float, traffic: Traffic, targets: int) -> None:
        """Take note of a step. targets: those of its global batch that count."""
        self.steps, self.seconds, self.traffic = self.steps + 1, self.seconds + step_s, self.traffic + traffic
        self.targets += targets
        self.all_steps, self.all_seconds = self.all_steps + 1, self.all_seconds + step_s

    def take(self, step: int) -> Record:
        """Return the means over the steps since the last call as keys of a record.

        Seconds are means of a rank; bytes are a step's, over all ranks; a ratio is the compression of the codec.
        """
        step_s, targets = self.seconds / self.steps, self.targets / self.steps
        traffic = dict(zip(TRAFFIC, (self.traffic / self.steps).tolist(), strict=True))
        self.steps, self.seconds, self.targets, self.traffic = 0, 0.0, 0, np.zeros(len(TRAFFIC))
        tokens_per_s = self.tokens_per_step / step_s
        flops = flops_per_token(self.config.model, self.config.data.sequence_length, self.config.finetuning.adapter)
        tflops = flops * tokens_per_s / self.ranks / 1e12
        record = {"step_s": step_s, "targets": targets, "tokens_per_s": tokens_per_s, "tflops_per_device": tflops}
        if self.peak_tflops:
            record["mfu"] = tflops / self.peak_tflops
        record |= {
            "communication_share": traffic["exposed_s"] / self.ranks / step_s,
            "eta_s": (self.config.run.steps - step) * step_s,
        }
        record |= {f"communication_{what}": traffic[what] / self.ranks for what in ("exposed_s", "hidden_s")}
        for kind in KINDS:
            plain_bytes, sent_bytes = traffic[f"{kind}_plain_bytes"], traffic[f"{kind}_bytes"]
            if sent_bytes:
                record |= {f"{kind}_plain_bytes": plain_bytes, f"{kind}_bytes": sent_bytes}
                record[f"{kind}_ratio"] = plain_bytes / sent_bytes
        return record


def open_log(folder: Path, first_step: int, steps: int, trackers: Sequence[str] = (), wide: bool = False) -> Log:
    """Open the log of a run in `folder` that goes on from `first_step`. trackers: names. Raises OSError."""
    path = folder / "log.jsonl"
    before = taken_before(path)  # including what was spent on steps that are cut off now
    damaged = _cut_back(path, first_step)
    bar = tqdm(total=steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True)
    log = Log(path.open("a", encoding="utf-8"), bar, wide=wide, before=before)
    if damaged:
        log.print(f"{counted(damaged, 'line')} of {path} cannot be read and went to {path.name}.damaged")
    run_file = folder / "run.toml"
    log.run_file = run_file.read_text(encoding="utf-8") if run_file.exists() else ""
    for name in trackers:
        try:
            log.trackers[name] = open_tracker(name, folder, first_step)
        except ImportError:
            log.print(f"no tracker {name}, as its package is not installed: pip install {PACKAGES[name]}")
        except Exception as error:  # of any package
            log.print(f"no tracker {name}: {printable(f'{type(error).__name__}: {error}')}")
    return log


MOST_NAMED = 0.9  # share of the tokens: where more of them count as targets, as in texts, a line does not say how many
LESS_NEEDED = (9, 6, 8, 7, 3, 4, 2)  # of the parts of a step's line: memory first


def step_line(record: Mapping[str, Any], steps: int, columns: int = 0) -> str:
    """Format one logged step for people: 'step     20/300  loss 6.1234  ...'. columns: to fit in; 0: any number."""
    host_gb = record.get("host_memory_gb")
    memory = f"{record['memory_gb']:.2f} GB" + (f" on the device, {host_gb:.2f} GB in the host" if host_gb else "")
    grad = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
    targets = record["targets"]
    are_few = targets < MOST_NAMED * record["tokens_per_s"] * record["step_s"]
    parts = [
        f"step {record['step']:>6}/{steps}",
        "  ".join([f"loss {record['loss']:.4f}", *_figure_parts(record)]),
        f"of {targets:,.0f} targets" if are_few else "",
        f"lr {record['learning_rate']:.2e}",
        f"grad {grad}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{record['tflops_per_device']:.3f} TFLOP/s a rank",
        f"MFU {100 * record['mfu']:.1f} %" if "mfu" in record else "",
        f"waiting {100 * record['communication_share']:.0f} %",
        memory,
        f"ETA {clock_text(record['eta_s'])}",
    ]
    return fitted(parts, LESS_NEEDED, columns)


def _figure_parts(record: Mapping[str, Any], before: str = "") -> list[str]:
    """Say what texts are rewarded with; or how often, and by how much, chosen answers are preferred; [] of others."""
    if f"{before}reward" in record:
        return [f"reward {record[f'{before}reward']:.3f}", f"length {record[f'{before}length']:.1f}"]
    if f"{before}rewards/accuracies" not in record:
        return []
    margin = record[f"{before}rewards/margins"]
    return [f"accuracy {record[f'{before}rewards/accuracies']:.3f}", f"margin {margin:.4f}"]


def clock_text(seconds: float) -> str:
    """Format a duration: 75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def resident_gb() -> float:
    """Peak resident memory of this process, in 1e9 bytes."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / 1e9


def _cut_back(path: Path, first_step: int) -> int:
    """Keep what was logged up to a step; return how many damaged lines went to a file beside. Raises OSError.

    A last line without its end is no damage: the job before was ended while it wrote.
    """
    lines = io.BytesIO(path.read_bytes()).readlines() if path.exists() else []  # splitlines would end them at \r too
    steps = [(line, record["step"] if (record := record_of(line)) else None) for line in lines]
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_bytes(b"".join(line for line, step in steps if step is not None and step <= first_step))
    damaged = [line for line, step in steps if step is None and line.strip() and line.endswith(b"\n")]
    if damaged:
        with path.with_name(f"{path.name}.damaged").open("ab") as file:
            file.writelines(damaged)
    aside.replace(path)
    return len(damaged)
