"""Write the same file with a parallel HDF5: h5py built with MPI, collective writes through MPI-IO.

    all      create the file together, then for each dataset, in the order of names
               write 1 .. n    n: the most slabs that a rank has of it, cut to requests below 2 GiB;
                               a rank with fewer takes part with nothing, or the others would wait for it for ever

Checksums, attributes and the rename are the writer's. MPI-IO waits on a core of its own. If HDF5 fails on one rank
alone inside a collective call, the others may not come back from it: `offsets`, the default, has no such call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

from hpcllm.checkpoint import file_layout
from hpcllm.checkpoint.exchange import FirstError
from hpcllm.checkpoint.plan import Plan, check_array
from hpcllm.checkpoint.slabs import Slab, boxes
from hpcllm.errors import CheckpointError, ConfigError
from hpcllm.mpi.collective_errors import raise_if_any_failed
from hpcllm.system.raw_files import disk_errors

REQUEST_BYTES = 1 << 30  # older MPI-IO and HDF5 count bytes of a request in 32 bits


def check_writer(writer: str) -> None:
    """Raises ConfigError if checkpoint.writer cannot write here; before any work."""
    if writer == "mpio" and not h5py.get_config().mpi:
        raise ConfigError(
            "checkpoint.writer = 'mpio' needs an h5py built with a parallel HDF5, and this one has none; "
            "valid: 'offsets', which writes the same file with any h5py"
        )


def write(
    temporary: Path, comm: MPI.Intracomm, plan: Plan, array_of: Callable[[Slab], np.ndarray], header_bytes: int
) -> dict[str, int]:
    """Create the file and write all slabs. Collective over comm. Returns dataset -> byte offset, on all ranks.

    array_of: as in writer.write. header_bytes: room for the header. Raises CheckpointError on all ranks, or an
    HpcllmError that array_of raised.
    """
    error: Exception | None = None
    offsets: dict[str, int] = {}
    try:
        with disk_errors(CheckpointError, f"cannot write {temporary}"):
            offsets = file_layout.allocate_datasets(temporary, plan.specs, header_bytes, driver="mpio", comm=comm)
            with h5py.File(temporary, "r+", driver="mpio", comm=comm) as file:
                error = _write_all(file, comm, plan, array_of)
                file.flush()
    except CheckpointError as fault:
        error = fault
    raise_if_any_failed(comm, error)
    return offsets


def _write_all(
    file: h5py.File, comm: MPI.Intracomm, plan: Plan, array_of: Callable[[Slab], np.ndarray]
) -> Exception | None:
    """Write all slabs; returns the error of array_of on this rank, which has written nothing from there on."""
    slabs: dict[str, list[Slab]] = {name: [] for name in plan.specs}
    for slab in plan.slabs:
        slabs[slab.dataset].append(slab)
    calls = np.array([sum(1 for slab in slabs[name] for _ in _requests(slab, plan)) for name in plan.specs], np.int64)
    comm.Allreduce(MPI.IN_PLACE, calls, MPI.MAX)
    first = FirstError()
    for name, count in zip(plan.specs, calls, strict=True):
        dataset = file[name].id
        done = 0
        for slab in slabs[name]:
            with first:
                array = array_of(slab)
                check_array(slab, array, plan.specs[name])
            for start, shape in _requests(slab, plan):
                inside = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                values = None if first.error else np.ascontiguousarray(array[inside]).reshape(shape)
                _write_one(dataset, slab.start, start, values)
                done += 1
        for _ in range(done, count):
            _write_one(dataset, (), (), None)
    return first.error


def _requests(slab: Slab, plan: Plan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and shape of the boxes within a slab that are written by one call each."""
    most = max(1, REQUEST_BYTES // plan.dtype(slab).itemsize)
    for begin in range(0, slab.elements, most):
        yield from boxes(slab.shape, begin, min(begin + most, slab.elements))


def _write_one(
    dataset: h5py.h5d.DatasetID, origin: tuple[int, ...], start: tuple[int, ...], values: np.ndarray | None
) -> None:
    """Collective; values: None to write nothing, otherwise what begins at origin + start of the dataset."""
    transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    target = dataset.get_space()
    if values is None:
        target.select_none()
        memory, values = h5py.h5s.create_simple((1,)), np.empty(1, dataset.dtype)
        memory.select_none()
    elif values.shape:
        target.select_hyperslab(tuple(o + s for o, s in zip(origin, start, strict=True)), values.shape)
        memory = h5py.h5s.create_simple(values.shape)
    else:
        memory = h5py.h5s.create(h5py.h5s.SCALAR)
    dataset.write(memory, target, values, dxpl=transfer)
