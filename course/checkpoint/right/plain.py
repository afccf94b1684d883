"""One file: the arrays, a table in JSON, and at the end the length and the checksum of the table."""

import json
import os
import re
import zlib

import numpy as np

PIECE = 1 << 20


def own_range(n, comm):
    return n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size


def place(length, comm):
    before = comm.exscan(length) or 0
    return before, comm.allreduce(length)


def together(comm, error):
    errors = [each for each in comm.allgather(error) if each]
    if errors:
        raise OSError(errors[0])


def write_all(file, data, offset):
    data = memoryview(data).cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def save(comm, folder, step, parts):
    path = folder / f"step_{step}.ckpt"
    temporary = folder / f"step_{step}.tmp"
    table, mine, offset = [], [], 0
    for name, values in parts.items():
        start, n = place(values.size, comm)
        mine.append((name, offset + 4 * start, 4 * values.size, zlib.crc32(values)))
        table.append((name, offset, n))
        offset += 4 * n
    pieces = comm.gather(mine, root=0)
    error = None
    try:
        if comm.rank == 0:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC))
    except OSError as fault:
        error = str(fault)
    together(comm, error)
    try:
        file = os.open(temporary, os.O_WRONLY)
        for (_, at, _, _), values in zip(mine, parts.values()):
            write_all(file, values, at)
        if comm.rank == 0:
            text = json.dumps({"step": step, "arrays": table, "pieces": pieces}).encode()
            text += len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little")
            write_all(file, text, offset)
        os.fsync(file)
        os.close(file)
    except OSError as fault:
        error = str(fault)
    together(comm, error)
    try:
        if comm.rank == 0:
            os.replace(temporary, path)
            directory = os.open(folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
    except OSError as fault:
        error = str(fault)
    together(comm, error)


def read_table(file):
    size = os.fstat(file).st_size
    tail = os.pread(file, 16, max(0, size - 16))
    length = int.from_bytes(tail[:8], "little")
    if len(tail) < 16 or length > size - 16:
        raise ValueError("cut")
    text = os.pread(file, length, size - 16 - length)
    if zlib.crc32(text) != int.from_bytes(tail[8:], "little"):
        raise ValueError("the table is damaged")
    return json.loads(text)


def is_whole(path):
    file = os.open(path, os.O_RDONLY)
    try:
        for pieces in read_table(file)["pieces"]:
            for _, offset, length, wanted in pieces:
                crc = 0
                for at in range(offset, offset + length, PIECE):
                    crc = zlib.crc32(os.pread(file, min(PIECE, offset + length - at), at), crc)
                if crc != wanted:
                    return False
        return True
    except (OSError, ValueError):
        return False
    finally:
        os.close(file)


def newest(folder):
    names = [(re.fullmatch(r"step_(\d+)\.ckpt", path.name), path) for path in folder.iterdir()]
    found = [(int(name[1]), path) for name, path in names if name]
    for _, path in sorted(found, reverse=True):
        if is_whole(path):
            return path
    return None


def load(comm, folder):
    path = comm.bcast(newest(folder) if comm.rank == 0 else None, root=0)
    if path is None:
        raise FileNotFoundError(f"no whole checkpoint in {folder}")
    file = os.open(path, os.O_RDONLY)
    table, parts = read_table(file), {}
    for name, offset, n in table["arrays"]:
        start, end = own_range(n, comm)
        parts[name] = np.empty(end - start, np.float32)
        if end > start:
            os.preadv(file, [parts[name]], offset + 4 * start)
    os.close(file)
    return table["step"], parts


PREDICTIONS = {"file_bytes": 12_000_000, "interval_s": 3076, "lost_share": 0.0195}
