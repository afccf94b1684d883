"""Memory that the planner predicts for published runs, beside what was measured: memory.md.

    python perf/plan/memory.py

    LUMI, each stage     allocated between steps, most allocated, most reserved by the allocator
    BLOOM                what a monitor showed of the fullest device
    rows with `oom`      and rows of the same tables that ran: did it fit?

Nothing is fitted to a row. The constants stand in hpcllm/plan/memory/: what the allocator holds on to was chosen by
LUMI's stages, the context by BLOOM's note on an idle device, gaps by the 13B rows at 2k tokens with those at 8k in
sight. Which loss and gradients a trainer has stands in megatron.py there, and was concluded
from all rows that ran, those of MPT included; so no table of rows that did not fit is a clean hold-out. BLOOM's memory
was in sight as well, but no number comes from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from published import Row, read_rows

from hpcllm.plan.layouts import parse_layout
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.memory.stage_memory import StageMemory, stage_memory
from hpcllm.plan.models import read_model

HERE = Path(__file__).resolve().parent
MIB, GIB = 1 << 20, 1 << 30
MEASURED = ("allocated_mib", "max_allocated_mib", "max_reserved_mib")

machine_of = lru_cache(read_machine)
model_of = lru_cache(read_model)


@dataclass(frozen=True)
class Outcome:
    """A row, and what the planner says of its memory."""

    row: Row
    machine: Machine
    stages: tuple[StageMemory, ...]

    @property
    def need_bytes(self) -> float:
        return max(stage.device_bytes for stage in self.stages)

    @property
    def is_over(self) -> bool:
        """Whether the planner says that it runs out of memory."""
        return self.need_bytes > self.machine.device.usable_bytes

    @property
    def shown_gib(self) -> float:
        return max(stage.shown_bytes(self.machine.device.usable_bytes) for stage in self.stages) / GIB


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    found = []
    for row in rows:
        machine, model = machine_of(row.machine), model_of(row.model)
        stages = stage_memory(model, parse_layout(row.layout), row.global_batch, machine)
        found.append(Outcome(row, machine, stages))
    return found


@dataclass(frozen=True)
class Told:
    """Rows that ran out of memory told apart from those that did not."""

    found: int  # out of memory, and said so
    missed: int
    wrong: int  # ran, though said not to fit
    ran: int  # and said so

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + self.wrong)

    @property
    def recall(self) -> float:
        return self.found / max(1, self.found + self.missed)

    def cells(self) -> str:
        return f"{self.found} | {self.missed} | {self.wrong} | {self.ran} | {self.precision:.2f} | {self.recall:.2f}"


def told(each: Sequence[Outcome]) -> Told:
    counts = {(over, oom): 0 for over in (True, False) for oom in (True, False)}
    for one in each:
        counts[one.is_over, one.row.oom] += 1
    return Told(counts[True, True], counts[False, True], counts[True, False], counts[False, False])


def stage_lines(each: Sequence[Outcome]) -> Iterator[str]:
    """LUMI: predicted / measured - 1 of each stage."""
    logs = tomllib.loads((HERE / "lumi_stages.toml").read_text(encoding="utf-8"))
    yield "| run | stage | allocated MiB | error | most allocated MiB | error | most reserved MiB | error |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for one in each:
        if one.row.id in logs:
            columns = [logs[one.row.id][key] for key in MEASURED]
            for stage, *measured in zip(one.stages, *columns, strict=True):
                held = stage.peak_bytes + stage.gaps + stage.cached
                pairs = zip(measured, (stage.allocated_bytes, stage.peak_bytes, held), strict=True)
                cells = " | ".join(f"{mib} | {size / MIB / mib - 1:+.1%}" for mib, size in pairs)
                yield f"| {one.row.id} | {stage.stage} | {cells} |"


def shown_lines(each: Sequence[Outcome]) -> Iterator[str]:
    """BLOOM: GiB that a monitor showed, among them what the allocator holds on to."""
    rows = [one for one in each if one.row.table == "bloom-176b" and one.row.memory_gb]
    errors = [one.shown_gib / one.row.memory_gb - 1 for one in rows if one.row.memory_gb]
    yield "| row | layout | shown GiB | predicted GiB | error | of it tensors |"
    yield "|---|---|--:|--:|--:|--:|"
    for one, error in zip(rows, errors, strict=True):
        tensors = max(stage.peak_bytes for stage in one.stages) / GIB
        layout = one.row.layout.split(",recompute")[0]
        yield f"| {one.row.id} | {layout} | {one.row.memory_gb} | {one.shown_gib:.1f} | {error:+.0%} | {tensors:.1f} |"
    within = sum(abs(error) <= 0.1 for error in errors)
    yield f"\nMedian error {median(map(abs, errors)):.1%}, {within} of {len(errors)} within 10 %."


def oom_lines(each: Sequence[Outcome]) -> Iterator[str]:
    """A line a group that has rows of both kinds or of the first, then all of them, then each row that was not told."""
    tables = {one.row.table for one in each if one.row.oom}
    mine = [one for one in each if one.row.table in tables]
    yield "| table | group | out of memory, found | missed | ran, called out of memory | ran | precision | recall |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for table, group in dict.fromkeys((one.row.table, one.row.group) for one in mine if one.row.oom):
        yield f"| {table} | {group} | {told([o for o in mine if o.row.group == group]).cells()} |"
    for part in ("2k", "8k"):
        yield f"| llama-13b | all of {part} | {told([o for o in mine if o.row.group.startswith(part)]).cells()} |"
    yield f"| all | | {told(mine).cells()} |"
    yield "\n| not told | layout | | needs GB | usable GB |\n|---|---|---|--:|--:|"
    for one in mine:
        if one.is_over != one.row.oom:
            yield _wrong(one)


def ran_lines(each: Sequence[Outcome]) -> Iterator[str]:
    """Of all other tables every row ran."""
    tables = {one.row.table for one in each if one.row.oom}
    others = [one for one in each if one.row.table not in tables]
    wrong = [one for one in others if one.is_over]
    yield f"{len(others) - len(wrong)} of {len(others)} rows are said to fit. Not so:"
    yield "\n| row | layout | | needs GB | usable GB |\n|---|---|---|--:|--:|"
    yield from map(_wrong, wrong)


def _wrong(one: Outcome) -> str:
    row, usable = one.row, one.machine.device.usable_bytes / 1e9
    what = "out of memory" if row.oom else "ran"
    layout = f"{row.group}: {row.layout.split(',recompute')[0]}"
    return f"| {row.id} | {layout} | {what} | {one.need_bytes / 1e9:.1f} | {usable:.1f} |"


def main() -> None:
    each = outcomes(read_rows())
    parts = {
        "LUMI, 175B: each stage": stage_lines,
        "BLOOM: the fullest device": shown_lines,
        "Out of memory": oom_lines,
        "Tables of runs that all fitted": ran_lines,
    }
    lines = ["# Memory of published runs, predicted", "", *(__doc__ or "").splitlines()[4:], ""]
    for title, made in parts.items():
        lines += [f"## {title}", "", *made(each), ""]
    (HERE / "memory.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
