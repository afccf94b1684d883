"""`hpcllm course links`: a student's encoded sum on slow links, beside float32's and ours.

in a Slurm job of several nodes     its own network, as it is                              one row
root, or user namespaces            4 hosts on this machine, links of each rate            a shell script
neither                             ranks sleep as long as a message takes on the link     watched.py

seconds of a sum, link by link --> gain over float32 --> the rate at which it falls to 1
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcllm.course.lab import RANKS
from hpcllm.course.launch import launch_command
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.system.text import table

SCRIPT = Path(__file__).with_name("links.sh")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
RATES = ("100mbit", "1gbit", "10gbit")
LIMIT_S = 240.0  # of a rate
NODES = "the network between the nodes of this job"
NAMESPACES = f"{RANKS} hosts made of namespaces on this machine, one rank each"
SLEEPS = "no links: ranks sleep as long as each message would take on one"


@dataclass(frozen=True)
class OnLink:
    """Seconds of a sum of 4 MiB on one link. rate: bytes a second; 0: unknown."""

    label: str
    rate: float
    plain_s: float
    student_s: float
    ours_s: float

    @property
    def gain(self) -> float:
        return self.plain_s / self.student_s


def bytes_per_s(text: str) -> float:
    """Parse '100mbit' or '2.5gbit'. Raises ValueError."""
    number, unit = text[:-4], text[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or not float(number):
        raise ValueError(f"rate {text!r} is unknown; valid: a number and kbit, mbit or gbit, as 100mbit or 2.5gbit")
    return float(number) * UNITS[unit] / 8


def kind_of_links() -> tuple[str, str]:
    """Return what there is to measure on here, and why not on something slower or more real."""
    if "SLURM_JOB_ID" in os.environ:
        many = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
        return (NODES, "") if many else (SLEEPS, "this Slurm job has one node, and srun starts the ranks")
    done = subprocess.run(["sh", str(SCRIPT), "probe"], capture_output=True, text=True, check=False)
    return (NAMESPACES, "") if done.returncode == 0 else (SLEEPS, (done.stderr.strip().splitlines() or [""])[-1])


def measure(file: Path, rates: Sequence[str]) -> tuple[str, str, list[OnLink]]:
    """Measure on each link; returns the kind of links, why not a better one, and the rows. Raises HpcllmError."""
    kind, why = kind_of_links()
    labels = ["as it is"] if kind == NODES else rates
    return kind, why, [_on_link(file, label, kind) for label in labels]


def _on_link(file: Path, label: str, kind: str) -> OnLink:
    rate = 0.0 if kind == NODES else bytes_per_s(label)
    with tempfile.TemporaryDirectory(prefix="hpcllm-links-", dir=Path.cwd() if kind == NODES else None) as folder:
        output = Path(folder) / "seconds.json"
        program = [sys.executable, "-m", "hpcllm.course.labs.codec.on_links", str(file), str(output)]
        words, environment = launch_command(RANKS)
        if kind == NAMESPACES:
            environment |= {"HPCLLM_MPIRUN": words[0]}
            words = ["sh", str(SCRIPT), "run", str(RANKS), label]
        elif kind == SLEEPS:
            program.append(str(rate))
        _run([*words, *program], environment)
        try:
            found = json.loads(output.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise HpcllmError(f"no rank has measured anything at {label}") from None
    return OnLink(label, rate, *(float(found[key]) for key in ("plain_s", "student_s", "ours_s")))


def _run(words: Sequence[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise HpcllmError(f"a sum on links took longer than {LIMIT_S:g} s; valid: faster links, by --rates") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise HpcllmError(f"a sum on links ended with exit code {process.returncode}: {said.strip()[-500:]}")


def crossing(rows: Sequence[OnLink]) -> float:
    """Return the bytes a second at which the gain falls to 1, on a line of logarithms between two links.

    0 where encoding never pays on these links, infinite where it pays on all.
    """
    ordered = sorted(rows, key=lambda row: row.rate)
    paying = [k for k, row in enumerate(ordered) if row.gain > 1]
    if not paying:
        return 0.0
    if paying[-1] == len(ordered) - 1:
        return math.inf
    low, high = ordered[paying[-1]], ordered[paying[-1] + 1]
    share = math.log(low.gain) / (math.log(low.gain) - math.log(high.gain))
    return low.rate * math.exp(share * math.log(high.rate / low.rate))


def lines(kind: str, why: str, rows: Sequence[OnLink]) -> list[str]:
    """Return the page: links, seconds on each, and where encoding stops to pay."""
    cells = [[row.label, *(f"{1e3 * s:.1f}" for s in (row.plain_s, row.student_s, row.ours_s)), f"{row.gain:.2f}"]
             for row in rows]  # fmt: skip
    head = ["link", "float32 ms", "yours ms", "ours ms", "gain"]
    page = [f"sums of 4 MiB on {RANKS} ranks", kind, *([f"because: {why}"] if why else [])]
    page += ["", *table(head, cells, indent="", gap="  "), ""]
    if not rows[0].rate:
        return page[:-1]
    at, fastest = crossing(rows), max(row.rate for row in rows)
    words = {0.0: "yours pays on none of these links", math.inf: f"yours pays up to {fastest / 1e6:g} MB/s and beyond"}
    return [*page, words.get(at, f"yours pays below about {at / 1e6:.3g} MB/s")]


def check_rates(text: str) -> list[str]:
    """Parse '100mbit,1gbit'. Raises ConfigError."""
    rates = [word for word in text.lower().split(",") if word]
    try:
        if not all(map(bytes_per_s, rates)) or not rates:
            raise ConfigError("--rates names no link; valid: as 100mbit,1gbit")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return rates
