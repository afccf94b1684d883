"""Log of a run: one line a logged step, log.jsonl, TensorBoard, a bar on a terminal.

Only rank 0 holds a Log. A resumed run first cuts log.jsonl back to the step it resumes from, so that a step is in
the file once.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
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

Record = dict[str, Any]
KINDS = ("gradients", "parameters", "forward", "backward", "tensor")
# seconds waited, seconds of sums behind computing; then bytes sent by kind, before and after the codec
TRAFFIC = ("exposed_s", "hidden_s", *(f"{kind}_{what}" for kind in KINDS for what in ("plain_bytes", "bytes")))
Traffic = NDArray[np.float64]  # (len(TRAFFIC),)


@dataclass
class Log:
    """Writes records to files and lines to standard output."""

    file: Any
    events: Any  # a SummaryWriter or None
    bar: Any
    before: Record = field(default_factory=dict)  # hours, energy and cost at the end of the last start

    def step(self, record: Record) -> None:
        """Write one logged step everywhere. Raises HpcllmError where a file cannot be written."""
        self.write(record)
        if self.bar.disable:
            print(step_line(record, self.bar.total), flush=True)
        else:
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_s']:.0f} tokens/s", refresh=False)
            self.bar.update(record["step"] - self.bar.n)

    def validation(self, record: Record) -> None:
        """Write the result of a validation everywhere. Raises HpcllmError where a file cannot be written."""
        self.write(record)
        line = f"step {record['step']:>6}/{self.bar.total}  validation loss {record['validation_loss']:.4f}"
        self.print(f"{line}  bits per byte {record['bits_per_byte']:.4f}")

    def write(self, record: Record) -> None:
        """Write a record to the files and print nothing. Raises HpcllmError where a file cannot be written."""
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            if self.events:
                for key, value in record.items():
                    if key != "step" and isinstance(value, int | float):
                        self.events.add_scalar(key, value, record["step"])
                self.events.flush()
        except OSError as error:
            raise HpcllmError(f"cannot write step {record['step']} to {self.file.name}: {error.strerror}") from error

    def print(self, text: str) -> None:
        """Print a line for people, above the bar if there is one."""
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        for part in (self.file, self.events):
            with contextlib.suppress(OSError):  # each record was flushed; what failed then would only fail again
                if part:
                    part.close()


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
    traffic: Traffic = field(default_factory=lambda: np.zeros(len(TRAFFIC)))  # summed over the ranks
    all_steps: int = 0
    all_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.global_batch * self.config.data.sequence_length

    @property
    def mean_tokens_per_s(self) -> float:
        return self.all_steps * self.tokens_per_step / self.all_seconds if self.all_steps else 0.0

    def add(self, step_s: float, traffic: Traffic) -> None:
        self.steps, self.seconds, self.traffic = self.steps + 1, self.seconds + step_s, self.traffic + traffic
        self.all_steps, self.all_seconds = self.all_steps + 1, self.all_seconds + step_s

    def take(self, step: int) -> Record:
        """Return the means over the steps since the last call as keys of a record.

        Seconds are means of a rank; bytes are a step's, over all ranks; a ratio is the compression of the codec.
        """
        step_s = self.seconds / self.steps
        traffic = dict(zip(TRAFFIC, (self.traffic / self.steps).tolist(), strict=True))
        self.steps, self.seconds, self.traffic = 0, 0.0, np.zeros(len(TRAFFIC))
        tokens_per_s = self.tokens_per_step / step_s
        flops = flops_per_token(self.config.model, self.config.data.sequence_length)
        tflops = flops * tokens_per_s / self.ranks / 1e12
        record = {"step_s": step_s, "tokens_per_s": tokens_per_s, "tflops_per_device": tflops}
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


def open_log(folder: Path, first_step: int, steps: int, tensorboard: bool) -> Log:
    """Open the log of a run in `folder` that goes on from `first_step`. Raises OSError."""
    path = folder / "log.jsonl"
    before = taken_before(path)  # including what was spent on steps that are cut off now
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _step_of(line) <= first_step]
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)
    bar = tqdm(total=steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True)
    log = Log(path.open("a", encoding="utf-8"), None, bar, before)
    if tensorboard:
        log.events = _summary_writer(folder, first_step, log)
    return log


def step_line(record: Mapping[str, Any], steps: int) -> str:
    """Format one logged step for people: 'step     20/300  loss 6.1234  ...'."""
    mfu = f"  MFU {100 * record['mfu']:.1f} %" if "mfu" in record else ""
    host_gb = record.get("host_memory_gb")
    memory = f"{record['memory_gb']:.2f} GB" + (f" on the device, {host_gb:.2f} GB in the host" if host_gb else "")
    grad = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
    return (
        f"step {record['step']:>6}/{steps}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"grad {grad}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"{record['tflops_per_device']:.3f} TFLOP/s a rank{mfu}  waiting {100 * record['communication_share']:.0f} %  "
        f"{memory}  ETA {clock_text(record['eta_s'])}"
    )


def clock_text(seconds: float) -> str:
    """Format a duration: 75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def resident_gb() -> float:
    """Peak resident memory of this process, in 1e9 bytes."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / 1e9


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off in the middle by the end of an earlier job


def _summary_writer(folder: Path, first_step: int, log: Log) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.print(
            "no TensorBoard events: the package is missing; pip install 'hpcllm[tensorboard]' or log.tensorboard=false"
        )
        return None
    return SummaryWriter(str(folder), purge_step=first_step + 1)
