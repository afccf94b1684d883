"""gpu.json -> gpu.md: what gpu.sh has measured, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcllm.codecs.names import parse_name

TOLD = {"Failed": "failed", "Said by tests": "facts", "Skipped": "skipped", "Warnings, times": "warnings"}
GOALS = {"bf16": 0.7, "fp16": 0.7, "int8": 0.7, "exp": 0.35, "zfp": 0.35}  # shares of the rate of a copy


def summary(results: dict[str, Any]) -> str:
    """gpu.md: what was measured, and nothing else."""
    where = results["where"]
    lines = [f"Made by gpu.sh on one {where['device']}, {where['torch']}. Shares are of a copy on the device.", ""]
    if "checks" in results:
        lines += check_lines(*results["checks"])
    if "codecs" in results:
        size_bytes = results["codecs"][0]["bytes"]
        lines += [f"Codecs, arrays of {size_bytes >> 20} MiB:", ""]
        titles = ("codec", "values", "encode, GB/s", "share", "decode, GB/s", "share", "goal")
        lines += [_row(titles), "|---|---|---:|---:|---:|---:|---:|"]
        lines += codec_rows(results["codecs"])
    if "mfu" in results:
        lines += ["", "Training on one device, bf16, fp32 master weights, attention by PyTorch's fused kernels:", ""]
        titles = ("model", "sequence", "recompute", "samples a microbatch", "step, s", "tokens/s", "TFLOP/s", "MFU")
        lines += [_row((*titles, "memory, GB (predicted)")), "|---|---:|---|---:|---:|---:|---:|---:|---:|"]
        lines += [mfu_row(r) for r in results["mfu"]]
    if "shared" in results:
        lines += ["", "Ranks that share the device, messages through pinned host memory:", ""]
        lines += ["| model | ranks | policy | step, s | tokens/s | waited a step, s |", "|---|---:|---|---:|---:|---:|"]
        lines += [shared_row(r) for r in results["shared"]]
    return "\n".join(lines) + "\n"


def check_lines(versions: dict[str, dict[str, str]], *records: dict[str, Any]) -> list[str]:
    """Versions, a row for each check, then what each has said."""
    lines = [f"- {name}: {text}" for name, text in versions["versions"].items()]
    lines += ["", "| check | exit code | passed | failed | skipped | last line |", "|---|---:|---:|---:|---:|---|"]
    lines += [_row(check_row(r)) for r in records]
    for title, key in TOLD.items():
        told = [f"- {r['check']}: {_cell(what)}: {_cell(why)}" for r in records for what, why in r.get(key, {}).items()]
        lines += ["", f"{title}:", "", *(told or ["- none"])]
    return [*lines, ""]


def check_row(r: dict[str, Any]) -> tuple[object, ...]:
    code = "not run" if r["exit_code"] is None else r["exit_code"]
    counts = r.get("passed", ""), len(r["failed"]) if "failed" in r else "", sum(r.get("skipped", {}).values())
    return r["check"], code, *counts, _cell(r["last_line"])


def _cell(text: object) -> str:
    """Text for a line of a table."""
    return " ".join(str(text).split()).replace("|", "/")


def codec_rows(records: list[dict[str, Any]]) -> list[str]:
    rows = []
    for encoded, decoded in zip(records[::2], records[1::2], strict=True):
        goal = GOALS.get(parse_name(encoded["codec"]).kind)
        numbers = " | ".join(f"{r['moved_gb_s']:.0f} | {100 * r['share']:.0f} %" for r in (encoded, decoded))
        rows.append(_row((encoded["codec"], encoded["dtype"], numbers, f"{100 * goal:.0f} %" if goal else "")))
    return rows


def mfu_row(r: dict[str, Any]) -> str:
    known = f"{100 * r['mfu']:.1f} %" if "mfu" in r else "peak not known"
    speed = (f"{r['step_s']:.3f}", f"{r['tokens_per_s']:,.0f}", f"{r['tflops_per_device']:.1f}", known)
    memory = f"{r['memory_gb']:.1f} ({r['predicted_gb']:.1f})"
    return _row((r["preset"], r["sequence"], r["recompute"], r["samples_a_microbatch"], *speed, memory))


def shared_row(r: dict[str, Any]) -> str:
    speed = (f"{r['median_s']:.3f}", f"{r['tokens_per_s']:,.0f}", f"{r['exposed_s']:.3f}")
    return _row((r["preset"], r["ranks"], r["policy"], *speed))


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
