#!/usr/bin/env python3
"""Make the pictures of README and of the documentation again: `python docs/pictures/make.py [NAME ...]`.

    schedule.svg plan.png       hpcllm schedule, hpcllm plan
    published.png               that of perf/plan, which python perf/plan/compare.py draws, small
    collectives.png             hpcllm perf plot, from the records of perf/collectives
    checkpoint.svg              from perf/checkpoint_speed.json
    measured-step.svg           hpcllm schedule --measured, of a run on two ranks made here
    assistant-mask.png,         a row of the store, and the loss in the report, of docs/tutorials/assistant.md, followed
    assistant-loss.svg          in the repository's folder
    report.png                  the report of runs/tiny (jobscripts/local/train.sh), photographed by a Chromium on PATH

PNGs are stored with few colours: tests/docs holds each picture to 60 kB. Run it in the environment of .venv.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.colors import ListedColormap
from PIL import Image

from hpcllm import plotting
from hpcllm.data.packing import SplitArrays, make_rows
from hpcllm.data.store import TokenStore

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


def assistant() -> None:
    store = TokenStore.open(ROOT / "chats.h5")
    rows = make_rows(SplitArrays.of(store, "train"), 128, "best-fit", True)
    kinds = np.zeros((rows.sequence, rows.sequence))  # 1: sees, 2: sees and is learned
    place = 0
    for start, inputs, targets in rows.pieces(0):
        learned = np.pad(rows.split.counts(start + 1, targets), (0, inputs - targets))
        kinds[place : place + inputs, place : place + inputs] = np.tril(np.ones((inputs, inputs)) + learned[:, None])
        place += inputs
    with plotting.figure(4.4, [4.2]) as (made, (axes,)):
        axes.imshow(kinds, cmap=ListedColormap(["#f4f4f4", "#8fcbee", "#0072b2"]), interpolation="nearest")
        axes.set(xlabel="token that is seen", ylabel="token that sees; dark: the next one is learned")
        plotting.save(made, HERE / "assistant-mask.png")
    shrink(HERE / "assistant-mask.png", colours=16, width=600)
    hpcllm("report runs/assistant")
    page = (ROOT / "runs/assistant/report/index.html").read_text(encoding="utf-8")
    found = re.search(r'alt="loss over the steps" src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert found
    (HERE / "assistant-loss.svg").write_bytes(base64.b64decode(found[1]))


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
    "assistant": assistant,
    "report": report,
}

if __name__ == "__main__":
    if strange := set(sys.argv[1:]) - set(PICTURES):
        sys.exit(f"no picture {', '.join(sorted(strange))}; valid: {', '.join(PICTURES)}")
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture]()
