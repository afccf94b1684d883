"""What a run says about itself while it runs: one line a logged step, log.jsonl, TensorBoard, a bar on a terminal.

Only rank 0 holds a Log. A resumed run first cuts log.jsonl back to the step it resumes from, so that a step stands in
the file once.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hpcllm.config import Config
from hpcllm.energy.account import taken_before
from hpcllm.errors import HpcllmError
from hpcllm.model.shapes import flops_per_token

Record = dict[str, Any]
KINDS = ("gradients", "parameters", "forward", "backward", "tensor")
# seconds waited, seconds of sums behind computing; then bytes sent by kind, before and after the codec
TRAFFIC = ("exposed_s", "hidden_s", *(f"{kind}_{what}" for kind in KINDS for what in ("plain_bytes", "bytes")))
Traffic = NDArray[np.float64]  # (len(TRAFFIC),)


@dataclass
class Log:
    file: Any
    events: Any  # a SummaryWriter or None
    bar: Any
    before: Record = field(default_factory=dict)  # what the run had taken at the end of its last start

    def step(self, record: Record) -> None:
        """Write one logged step everywhere. Raises HpcllmError where a file cannot be written."""
        self._write(record)
        if self.bar.disable:
            print(step_line(record, self.bar.total), flush=True)
        else:
            self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_s']:.0f} tokens/s", refresh=False)
            self.bar.update(record["step"] - self.bar.n)

    def validation(self, record: Record) -> None:
        self._write(record)
        line = f"step {record['step']:>6}/{self.bar.total}  validation loss {record['validation_loss']:.4f}"
        self.say(f"{line}  bits per byte {record['bits_per_byte']:.4f}")

    def note(self, record: Record) -> None:
        """What belongs into the files, and is not said aloud."""
        self._write(record)

    def memory(self, record: Record, line: str) -> None:
        self._write(record)
        self.say(line)

    def say(self, text: str) -> None:
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

    def _write(self, record: Record) -> None:
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            if self.events:
                self._add_events(record)
        except OSError as error:
            raise HpcllmError(f"cannot write step {record['step']} to {self.file.name}: {error.strerror}") from error

    def _add_events(self, record: Record) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self.events.add_scalar(key, value, record["step"])
        self.events.flush()


@dataclass
class Pace:
    """Time of the steps since the last logged one, and of all steps of this start."""

    config: Config
    ranks: int
    peak_tflops: float | None  # of one rank's device; None: not known, so no MFU
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
        """The means over the steps since the last call, as keys of a record; bytes are a step's, over all ranks."""
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
        return record | _traffic_record(traffic, self.ranks)


def _traffic_record(traffic: dict[str, float], ranks: int) -> Record:
    """Of one step: mean seconds of a rank; bytes over all ranks, and how many times fewer the codec made them."""
    record = {f"communication_{what}": traffic[what] / ranks for what in ("exposed_s", "hidden_s")}
    for kind in KINDS:
        plain_bytes, sent_bytes = traffic[f"{kind}_plain_bytes"], traffic[f"{kind}_bytes"]
        if sent_bytes:
            record |= {f"{kind}_plain_bytes": plain_bytes, f"{kind}_bytes": sent_bytes}
            record[f"{kind}_ratio"] = plain_bytes / sent_bytes
    return record


def open_log(folder: Path, first_step: int, steps: int, tensorboard: bool) -> Log:
    """The log of a run in `folder` that goes on from `first_step`. Raises OSError."""
    path = folder / "log.jsonl"
    before = taken_before(path)  # with what was spent on steps that are cut off now
    kept = [line for line in _lines(path) if _step_of(line) <= first_step]
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)
    bar = tqdm(total=steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True)
    log = Log(path.open("a", encoding="utf-8"), None, bar, before)
    if tensorboard:
        log.events = _summary_writer(folder, first_step, log)
    return log


def step_line(record: Mapping[str, Any], steps: int) -> str:
    """'step     20/300  loss 6.1234  ...': one logged step for people."""
    mfu = f"  MFU {100 * record['mfu']:.1f} %" if "mfu" in record else ""
    grad = "overflow" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
    return (
        f"step {record['step']:>6}/{steps}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"grad {grad}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"{record['tflops_per_device']:.3f} TFLOP/s a rank{mfu}  waiting {100 * record['communication_share']:.0f} %  "
        f"{_memory_text(record)}  ETA {clock(record['eta_s'])}"
    )


def _memory_text(record: Mapping[str, Any]) -> str:
    host_gb = record.get("host_memory_gb")
    return f"{record['memory_gb']:.2f} GB" + (f" on the device, {host_gb:.2f} GB in the host" if host_gb else "")


def clock(seconds: float) -> str:
    """75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def resident_gb() -> float:
    """The most memory this process has had resident, in 1e9 bytes."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / 1e9


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut off in the middle by the end of an earlier job


def _summary_writer(folder: Path, first_step: int, log: Log) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.say(
            "no TensorBoard events: the package is missing; pip install 'hpcllm[tensorboard]' or log.tensorboard=false"
        )
        return None
    return SummaryWriter(str(folder), purge_step=first_step + 1)
