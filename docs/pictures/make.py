#!/usr/bin/env python3
"""Make the pictures of README and of the documentation again: `python docs/pictures/make.py [NAME ...]`.

    schedule.svg plan.png       hpcllm schedule, hpcllm plan
    published.png               that of perf/plan, which python perf/plan/compare.py draws, small
    collectives.png             hpcllm perf plot, from the records of perf/collectives
    checkpoint.svg              from perf/checkpoint_speed.json
    measured-step.svg           hpcllm schedule --measured, of a run on two ranks made here
    report.png                  the report of runs/tiny (jobscripts/local/train.sh), photographed by a Chromium on PATH

PNGs are stored with few colours: tests/docs holds each picture to 60 kB. Run it in the environment of .venv.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from PIL import Image

from hpcllm import plotting

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAN = "--machine lumi-g --model llama-13b --devices 64 --global-batch 1024 --top 3"
RUN = """
[run]
name = "traced"
steps = 12
[data]
store = "my.h5"
sequence_length = 128
global_batch = 16
[mesh]
pp = 2
[pipeline]
microbatches = 8
[log]
trace_steps = [10]
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
METHODS = ("pwrite + fsync", "hpcllm offsets", "torch.save", "torch.distributed.checkpoint")


def hpcllm(arguments: str, cwd: Path = ROOT, ranks: int = 0) -> None:
    start = ["bash", str(ROOT / "jobscripts/local/mpirun.sh"), str(ranks)] if ranks else []
    subprocess.run([*start, sys.executable, "-m", "hpcllm", *arguments.split()], cwd=cwd, check=True)


def shrink(path: Path, colours: int = 64, width: int = 1000) -> None:
    """Store a PNG with few colours and at most so many pixels a row."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    if small.width > width:
        small = small.resize((width, round(small.height * width / small.width)), Image.Resampling.LANCZOS)
    # kmeans: each colour becomes the mean of its pixels, without which grey turns violet
    few = small.quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def schedule() -> None:
    hpcllm(f"schedule zb-h1 --stages 3 --microbatches 5 --plot {HERE / 'schedule.svg'}")


def plan() -> None:
    hpcllm(f"plan {PLAN} --plot {HERE / 'plan.png'}")
    shrink(HERE / "plan.png")


def published() -> None:
    shutil.copy(ROOT / "perf/plan/published.png", HERE)
    shrink(HERE / "published.png", colours=160, width=800)


def collectives() -> None:
    records = ROOT / "perf/collectives/hosts2.json"
    hpcllm(f"perf plot {records} --plot {HERE / 'collectives.png'}")
    shrink(HERE / "collectives.png")


def checkpoint() -> None:
    rows = json.loads((ROOT / "perf/checkpoint_speed.json").read_text(encoding="utf-8"))
    bars = [row for row in rows if row["method"] in METHODS and not row["with_mpio"] and row["split"] == "dp"]
    with plotting.figure(7, [3.0]) as (made, (axes,)):
        for place, row in enumerate(reversed(bars)):
            speed = median(turn["write"] for turn in row["gb_s"])
            colour = plotting.BAR_COLOURS[METHODS.index(row["method"])]
            axes.barh(place, speed, color=colour)
            axes.text(speed, place, f" {speed:.2f}", va="center")
        labels = [f"{row['method']}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in reversed(bars)]
        axes.set_yticks(range(len(bars)), labels)
        axes.set(xlabel="GB/s written, fsync included; median of 4")
        plotting.save(made, HERE / "checkpoint.svg")


def measured_step() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN, encoding="utf-8")
        hpcllm(f"prepare {ROOT / 'docs'} {ROOT / 'hpcllm'} --output my.h5", folder)
        hpcllm("train run.toml", folder, ranks=2)
        trace = next(folder.glob("runs/traced/trace/*.json"))
        hpcllm(f"schedule --measured {trace} --plot {HERE / 'measured-step.svg'}")


def report() -> None:
    page = ROOT / "runs/tiny/report/index.html"
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser or not page.parents[1].is_dir():
        sys.exit(f"report: needs one of {', '.join(BROWSERS)} on PATH, and runs/tiny of jobscripts/local/train.sh")
    hpcllm("report runs/tiny")
    photograph = [f"--screenshot={HERE / 'report.png'}", "--window-size=1000,920", "--hide-scrollbars"]
    subprocess.run([browser, "--headless", "--no-sandbox", *photograph, page.as_uri()], check=True)
    shrink(HERE / "report.png", width=800)


PICTURES = {
    "schedule": schedule,
    "plan": plan,
    "published": published,
    "collectives": collectives,
    "checkpoint": checkpoint,
    "measured-step": measured_step,
    "report": report,
}

if __name__ == "__main__":
    if strange := set(sys.argv[1:]) - set(PICTURES):
        sys.exit(f"no picture {', '.join(sorted(strange))}; valid: {', '.join(PICTURES)}")
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture]()
