"""What the collectives claim, held against the records of collectives.sh: a Markdown table.

    python perf/claims.py FOLDER        a claim without records is left out; needs nothing but Python

A speed-up is the median time of the faster of the others over ours, out of one record file unless it says otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
LIBRARY = ("mpi", "native")
FLAT = ("ring", "two_step")
MIB = 2**20
LARGE_BYTES = 16 * MIB


@dataclass(frozen=True)
class Row:
    claim: str
    where: str
    measured: float
    required: float
    text: Callable[[float], str]

    @property
    def holds(self) -> bool:
        return self.measured >= self.required

    def __str__(self) -> str:
        required = f"at least {self.text(self.required)}"
        cells = [self.claim, self.where, required, self.text(self.measured), "yes" if self.holds else "**no**"]
        return f"| {' | '.join(cells)} |"


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def size(record_bytes: int) -> str:
    return f"{record_bytes // MIB} MiB" if record_bytes >= MIB else f"{record_bytes} B"


@dataclass(frozen=True)
class Folder:
    path: Path

    def read(self, pattern: str) -> list[Record]:
        """The records of all runs whose names match."""
        files = sorted(self.path.glob(f"{pattern}.json"))
        return [record for file in files for record in json.loads(file.read_text(encoding="utf-8"))]


def fastest(records: list[Record], algorithms: tuple[str, ...], codec: str, size_bytes: int) -> Record | None:
    """The record of the least median time."""
    found = [r for r in records if (r["codec"], r["bytes"]) == (codec, size_bytes) and r["algorithm"] in algorithms]
    return min(found, key=lambda r: r["median_s"], default=None)


def sizes(records: list[Record], least_bytes: int) -> list[int]:
    return sorted({r["bytes"] for r in records if r["bytes"] >= least_bytes})


def host_claims(folder: Folder) -> Iterator[Row]:
    """The library as it chooses, and the best of all its algorithms, each of which is a run of its own."""
    for hosts in (2, 3, 4):
        records = folder.read(f"hosts{hosts}")
        for size_bytes in sizes(records, LARGE_BYTES):
            where = f"{hosts} hosts, 1 Gbit/s, {size(size_bytes)}"
            library = fastest(records, LIBRARY, "raw", size_bytes)
            best = fastest([*records, *folder.read(f"hosts{hosts}_library*")], LIBRARY, "raw", size_bytes)
            ours = fastest(records, ("two_step",), "int8:256", size_bytes)
            if library and best and ours:
                for name, other in (("native fp32", library), ("the library's best fp32", best)):
                    speed_up = other["median_s"] / ours["median_s"]
                    yield Row(f"int8 two_step over {name}", where, speed_up, 3.5, times)
                yield Row("int8 two_step of its bound", where, ours["bound_s"] / ours["median_s"], 0.85, percent)
        records = folder.read(f"hosts{hosts}_bf16")
        for size_bytes in sizes(records, LARGE_BYTES):
            raw, coded = (fastest(records, FLAT, codec, size_bytes) for codec in ("raw", "exp"))
            if raw and coded:
                where = f"{hosts} hosts, 1 Gbit/s, {size(size_bytes)} of bf16"
                yield Row("exp over raw", where, raw["median_s"] / coded["median_s"], 1.25, times)


def level_claims(folder: Folder) -> Iterator[Row]:
    records = folder.read("levels")
    for codec in ("raw", "int8:256"):
        for size_bytes in sizes(records, LARGE_BYTES):
            ours = fastest(records, ("two_level",), codec, size_bytes)
            for name, algorithms, theirs in (("flat", FLAT, codec), ("native fp32", LIBRARY, "raw")):
                other = fastest(records, algorithms, theirs, size_bytes)
                if other and ours:
                    where = f"2 hosts of 2 ranks, {codec}, {size(size_bytes)}"
                    yield Row(f"two_level over {name}", where, other["median_s"] / ours["median_s"], 1.0, times)


def codec_claims(folder: Folder) -> Iterator[Row]:
    for record in folder.read("codecs_float32"):
        is_claimed = record["codec"] == "int8:256" and record["threads"] == 1 and record["bytes"] >= LARGE_BYTES
        if is_claimed and record["memcpy_share"]:
            where = f"{record['algorithm']}, 1 thread, {size(record['bytes'])}"
            yield Row("int8:256 of memcpy, bytes read and written", where, record["memcpy_share"], 0.5, percent)


def setting_claims(folder: Folder) -> Iterator[Row]:
    """Not a claim of ours: the library is set as well as we know."""
    set_well = folder.read("settings_cluster")
    for size_bytes in sizes(set_well, LARGE_BYTES):
        default = fastest(folder.read("settings_default"), LIBRARY, "raw", size_bytes)
        ours = fastest(set_well, LIBRARY, "raw", size_bytes)
        if default and ours:
            where = f"2 hosts, 1 Gbit/s, {size(size_bytes)}; two runs"
            speed_up = default["median_s"] / ours["median_s"]
            yield Row("Open MPI with the settings of cluster.sh over its default", where, speed_up, 0.95, times)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: claims.py FOLDER, where collectives.sh has left its records")
    folder = Folder(Path(sys.argv[1]))
    parts = (host_claims, level_claims, codec_claims, setting_claims)
    rows = [row for part in parts for row in part(folder)]
    print("| claim | where | required | measured | holds |\n|---|---|---:|---:|---|")
    for row in rows:
        print(row)
    print()


if __name__ == "__main__":
    main()
