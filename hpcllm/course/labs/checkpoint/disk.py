"""Work out what a loss of power leaves of files, from the calls made: the worst that the rules of POSIX allow. Pure.

    write      in memory, until the rank that wrote it syncs the file (ranks may be on several nodes: each has a memory)
    rename     in memory, until somebody syncs the folder; it may reach the disk by itself, and before what was written

So after each call there are two worst cases: all changes of names have reached the disk, or none that was not synced.
In both all that was written and not synced is lost: zeros in the file, which has its length. Lengths are never lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from hpcllm.course.labs.checkpoint.scheduler import Event

Files = Mapping[str, bytes]


@dataclass
class Inode:
    """A file without its name: what is on the disk, and writes (rank, offset, data) that are in memory alone."""

    stored: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int, bytes]] = field(default_factory=list)

    def write(self, rank: int, offset: int, data: bytes) -> None:
        self.pending.append((rank, offset, data))
        self.stored.extend(bytes(max(0, offset + len(data) - len(self.stored))))

    def sync(self, rank: int) -> None:
        """Store what this rank has written."""
        for writer, offset, data in self.pending:
            if writer == rank:
                self.stored[offset : offset + len(data)] = data
        self.pending = [write for write in self.pending if write[0] != rank]


@dataclass(frozen=True)
class Left:
    """A folder after the power is back. returned: ranks that had returned when it went."""

    files: Files
    returned: int
    has_names: bool  # changes of names had reached the disk
    last: str  # call


class Disk:
    """A folder whose calls are followed one by one."""

    def __init__(self, files: Mapping[str, tuple[int, bytes]]) -> None:
        """Begin with files that are all on the disk: name -> number of the inode and content."""
        self.inodes = {number: Inode(bytearray(content)) for number, content in files.values()}
        self.names = {name: number for name, (number, _) in files.items()}
        self.stored_names = dict(self.names)

    def follow(self, event: Event) -> None:
        """Do what a call did."""
        call, name = event.call, PurePath(event.call.path).name
        match call.name:
            case "open" if self.names.get(name) != event.inode:
                self.names[name] = event.inode
                self.inodes[event.inode] = Inode()
            case "write":
                self.inodes.setdefault(call.inode, Inode()).write(event.rank, call.offset, call.data)
            case "sync" if call.is_folder:
                self.stored_names = dict(self.names)
            case "sync":
                self.inodes.setdefault(call.inode, Inode()).sync(event.rank)
            case "rename" if name in self.names:
                self.names[PurePath(call.target).name] = self.names.pop(name)
            case "link" if name in self.names:
                self.names[PurePath(call.target).name] = self.names[name]
            case "remove":
                self.names.pop(name, None)

    def left(self, names: Mapping[str, int]) -> Files:
        return {name: bytes(self.inodes[number].stored) for name, number in names.items()}


def losses(files: Mapping[str, tuple[int, bytes]], events: Sequence[Event], ranks: int) -> Iterator[Left]:
    """Yield what is left if the power goes after each call, each folder once; at last after all ranks have returned."""
    disk, seen = Disk(files), set()
    for number, event in enumerate(events):
        disk.follow(event)
        is_last = number == len(events) - 1
        returned = ranks if is_last else events[number + 1].returned
        for has_names, names in ((True, disk.names), (False, disk.stored_names)):
            left = disk.left(names)
            key = returned > 0, has_names, tuple(sorted(left.items()))
            if key not in seen:
                seen.add(key)
                yield Left(left, returned, has_names, event.call.name)
