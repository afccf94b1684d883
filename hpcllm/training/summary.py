"""Closing table of a run, as text and for --json."""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.config.schema import Config
from hpcllm.evaluation.held_out import Validation
from hpcllm.system.energy import account
from hpcllm.system.output import COLUMNS

NAME_COLUMNS = len("training loss  ")  # the widest name of a row, and the gap


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Result of a start of a run, equal on every rank."""

    config: Config
    ranks: int
    bubble: float  # share of a step that the schedule lets a rank idle
    step: int
    loss: float  # of the last step; NaN if this start made none
    validation: Validation | None
    zstd19_bits_per_byte: float
    is_chat: bool  # it was trained on chats, which `generate --chat` goes on with
    tokens_per_s: float
    checkpoint: Path | None
    stopped_by: str  # why this start ended early, or ''
    not_requeued: str  # why a run that stopped may not go back into the queue, or ''
    # hours, energy, cost of all starts, see system/energy/account.py
    taken: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for people."""
        config, rows = self.config, []
        mesh = config.mesh
        rows.append(("run", str(Path(config.run.folder) / config.run.name)))
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        rows.append(("layout", f"{ranks}: dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, bubble {100 * self.bubble:.0f} %"))
        stopped = f", stopped by {self.stopped_by}" if self.stopped_by else ""
        more = ", the checkpoint is further than run.steps" if self.step > config.run.steps else ""
        rows.append(("steps", f"{self.step} of {config.run.steps}{more}{stopped}"))
        if math.isfinite(self.loss):
            rows.append(("training loss", f"{self.loss:.4f}"))
        rows += self._held_out()
        if self.tokens_per_s:
            rows.append(("speed", f"{self.tokens_per_s:,.0f} tokens/s"))
        rows += account.rows(self.taken)
        folder = shlex.quote(str(Path(config.run.folder) / config.run.name))
        rows.append(("report", _command("report", folder)))
        if self.checkpoint:
            path = shlex.quote(str(self.checkpoint))
            rows.append(("checkpoint", str(self.checkpoint)))
            prompt = ("--chat", "--prompt", "'Hello'") if self.is_chat else ("--prompt", "'def main('")
            rows.append(("generate", _command("generate", path, *prompt)))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the values for --json; keys carry the unit, an unknown value is null."""
        validation = self.validation
        return {
            "run_folder": str(Path(self.config.run.folder) / self.config.run.name),
            "ranks": self.ranks,
            "mesh": {"dp": self.config.mesh.dp, "pp": self.config.mesh.pp, "tp": self.config.mesh.tp},
            "step": self.step,
            "steps": self.config.run.steps,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "validation_loss": validation.loss if validation else None,
            "bits_per_byte": validation.bits_per_byte if validation else None,
            **({f"validation_{key}": value for key, value in validation.figures.items()} if validation else {}),
            "zstd19_bits_per_byte": self.zstd19_bits_per_byte if math.isfinite(self.zstd19_bits_per_byte) else None,
            "tokens_per_s": self.tokens_per_s,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "stopped_by": self.stopped_by or None,
            **self.taken,
        }

    def text(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

    def _held_out(self) -> list[tuple[str, str]]:
        if not self.validation:
            why = "no held-out prompts" if self.config.finetuning.kind == "grpo" else "the store has too little text"
            return [] if self.stopped_by else [("held-out loss", f"none: {why} to validate with")]
        if "reward" in self.validation.figures:
            words = f"{self.validation.figures['reward']:.4f}, the likeliest texts of {self.validation.samples} prompts"
            return [("held-out reward", words)]
        rows = [("held-out loss", f"{self.validation.loss:.4f}, {self.validation.samples} samples")]
        if "rewards/accuracies" in self.validation.figures:
            rows.append(("accuracy", f"{self.validation.figures['rewards/accuracies']:.3f} of held-out pairs"))
        if self.validation.bits_per_byte is None:
            return rows
        zstd = f"   (zstd -19: {self.zstd19_bits_per_byte:.3f})" if math.isfinite(self.zstd19_bits_per_byte) else ""
        return [*rows, ("bits per byte", f"{self.validation.bits_per_byte:.3f} on held-out text{zstd}")]


def _command(*words: str) -> str:
    """Write a command that a shell reads as one, in lines of 80 columns with the name of their row."""
    lines = [f"{_python()} -m hpcllm {words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > COLUMNS - NAME_COLUMNS - len(" \\"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _python() -> str:
    """Path for a shell in this folder to start the interpreter that runs this, with no environment activated."""
    near = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if near.startswith("..") else near)
