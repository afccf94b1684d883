"""One measurement session: the allocation it runs on, and where its records go as they come.

    machine, library, device of the arrays     checked before any work
    rows on standard output, the JSON file     complete after each size: a measurement that is cut off leaves its rows
    the picture                                at the end

With --json alone the rows go to standard error, and standard output is JSON alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from tqdm import tqdm

from hpcllm.codecs import Codec
from hpcllm.collectives.group import Group
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.gpu_aware import gpu_aware
from hpcllm.mpi.message_memory import let_mpi_read_devices
from hpcllm.perf.arguments import Options
from hpcllm.perf.picture import draw
from hpcllm.perf.records import (
    Record,
    bound_s,
    bus_factor,
    columns_of,
    table_head,
    table_row,
    to_json,
    write_json,
)
from hpcllm.perf.timing import Seconds
from hpcllm.perf.values import codec_ratio
from hpcllm.system import device
from hpcllm.system.output import STANDARD_OUTPUT, check_writable, folded
from hpcllm.system.text import counted

VALUE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def library_name() -> str:
    """Name and version of the MPI library: 'Open MPI 5.0.8'."""
    text = MPI.Get_library_version().replace("\t", " ").split("\n")[0]
    words = [word.strip("v,:\0") for word in text.split()]
    version = next((word for word in words if word[:1].isdigit()), "")
    name = "Open MPI" if "Open MPI" in text else words[0]
    return f"{name} {version}".strip()


def facts(dtype: str, group: Group) -> str:
    """One line on a session: 'float32, 4 ranks on 2 nodes, Open MPI 5.0.8'."""
    return f"{dtype}, {counted(group.size, 'rank')} on {counted(group.nodes, 'node')}, {library_name()}"


def record_of(
    operation: str,
    options: Options,
    size_bytes: int,
    codec: Codec,
    seconds: Seconds,
    ranks: int = 1,
    nodes: int = 1,
    link_gb_s: float | None = None,
    **measured: Any,
) -> Record:
    """Record of one case: what follows from its options and its time, beside what else was measured."""
    rate, limit = size_bytes / seconds.median / 1e9, None
    if link_gb_s:
        limit = bound_s(operation, size_bytes, ranks, nodes, codec_ratio(codec.name, codec.dtype), link_gb_s)
    return Record(
        operation=operation, codec=codec.name, dtype=options.dtype, ranks=ranks, nodes=nodes, bytes=size_bytes,
        **seconds.summary(), algbw_gb_s=rate, busbw_gb_s=rate * bus_factor(operation, ranks), bound_s=limit,
        link_gb_s=link_gb_s, library=library_name(), memory=options.memory, device=options.device, **measured,
    )  # fmt: skip


def node_of_ranks(group: Group) -> NDArray[np.int32]:
    """Number of each rank's node, (ranks,). Collective over group."""
    numbers = np.empty(group.size, dtype=np.int32)
    group.comm.Allgather(np.array([group.peers.rank], dtype=np.int32), numbers)
    return numbers


def check_memory(need_bytes: int, group: Group) -> None:
    """Raise ConfigError if the arrays of the node's ranks are larger than its memory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = max(group.node_sizes)
    if need_bytes * ranks > memory_bytes:
        raise ConfigError(
            f"--sizes: the largest needs {need_bytes / 1e9:.1f} GB a rank, {need_bytes * ranks / 1e9:.1f} GB for "
            f"{ranks} ranks of a node that has {memory_bytes / 1e9:.1f} GB; ask for less"
        )


def open_device(options: Options, group: Group) -> tuple[torch.device, str]:
    """Device of this rank's arrays, and for people where messages of a device lie, "" for the CPU's.

    Collective over group. Raises ConfigError if PyTorch has no such device.
    """
    found = find_device(options, device.local_rank(group.node.rank))
    if options.device == "cpu":
        return found, ""
    reach = gpu_aware(group.comm, found, options.gpu_aware, Path.cwd())
    let_mpi_read_devices(reach.direct)
    return found, f"messages {'on the device' if reach.direct else 'in pinned host memory'}: {reach.why}"


def find_device(options: Options, node_rank: int) -> torch.device:
    """Device of the arrays of a rank of a node. Raises ConfigError if PyTorch has no such device."""
    if options.device == "cpu":
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        raise ConfigError(f"--device gpu: {device.no_device_reason(os.environ)}; or --device cpu")
    return device.choose_device("gpu", node_rank)


class Report:
    """Rows, file and picture of the records of a session; only rank 0 writes.

    Collective over comm, as are `add` and `close`. Raises ConfigError for files that cannot be written.
    """

    def __init__(self, options: Options, comm: MPI.Intracomm, sizes: int) -> None:
        self._options, self._comm = options, comm
        self.records: list[Record] = []
        on_root(comm, lambda: check_writable(options.json, options.plot))
        hidden = comm.rank > 0 or not sys.stderr.isatty()
        self._bar = tqdm(total=sizes, unit="size", leave=False, disable=hidden, file=sys.stderr)

    def say(self, text: str) -> None:
        """Print a line for people."""
        if self._comm.rank == 0:
            to_stderr = self._options.json == STANDARD_OUTPUT
            lines = [text] if self._options.wide else folded(text)
            tqdm.write("\n".join(lines), file=sys.stderr if to_stderr else sys.stdout)
            sys.stdout.flush()

    def add(self, records: Sequence[Record]) -> None:
        """Print and save the records of one size."""
        columns = columns_of(records[0], self._options.wide) if records else []
        if records and not self.records:
            self.say(table_head(columns))
        self.records += records
        for record in records:
            self.say(table_row(record, columns))
        on_root(self._comm, self._save)
        self._bar.update()

    def close(self) -> None:
        """Draw the picture; with --json alone print the records."""
        self._bar.close()
        on_root(self._comm, self._finish)

    def _save(self) -> None:
        if self._options.json and self._options.json != STANDARD_OUTPUT:
            write_json(self._options.json, self.records)

    def _finish(self) -> None:
        self._save()
        if self._options.json == STANDARD_OUTPUT:
            print(to_json(self.records), end="", flush=True)
        if self._options.plot and self.records:
            draw(self.records, self._options.plot)
