"""Program in a cage: the script that sandbox.py starts, in a Python of its own that has imported nothing else.

    this process            namespaces of its own: files, network, processes, IPC --> fork
      |  waits, then kills the other with everything in it                      |
      |                                                            root: an empty tmpfs with Python and libraries,
      |                                                            read-only; no /proc, /etc, /home; nobody's rights,
      |                                                            limits of memory, time, files; no further process
      `--<-- verdict, one line of JSON, through a pipe --<-- exec of the program

A process that is started as root gives its rights away; any other makes a user namespace, where the system allows
that. It reads from standard input one line of JSON, limits and program, and writes the verdict to standard output. It
imports nothing of hpcllm, so that there is nothing of ours inside the cage. Linux alone has these calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS = 38
NOBODY = 65534
MOST_FILES = 32  # open at once
VERDICT = 3  # number of the pipe's end
LARGEST_VERDICT_BYTES = 4096
ROOTS = ("/usr", "/lib", "/lib64", "/lib32")
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program of standard input and write what became of it."""
    settings, nothing = json.loads(sys.stdin.buffer.readline()), os.open(os.devnull, os.O_RDWR)
    try:
        seal(settings["scratch"], settings["scratch_bytes"], settings["prefixes"])
    except OSError as error:
        print(json.dumps({"impossible": str(error)}), flush=True)
        return 0
    read, write = os.pipe()
    inside = os.fork()  # the first process of its namespace: with it all others end
    if inside == 0:
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.dup2(write, VERDICT)
        os.closerange(VERDICT + 1, 1 << 10)
        cage(settings)
    os.close(write)
    print(json.dumps(wait(inside, read, settings["limit_s"])), flush=True)
    return 0


def seal(scratch: str, scratch_bytes: int, prefixes: list[str]) -> None:
    """Leave the network, the processes and the files of this machine. Raises OSError where that is not allowed."""
    user, group, is_root = os.getuid(), os.getgid(), os.geteuid() == 0
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    call(LIBC.unshare, "unshare", flags if is_root else flags | CLONE_NEWUSER)
    if not is_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("none", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},mode=755,nr_inodes=1000")
    for path in dict.fromkeys((*ROOTS, *prefixes)):
        show(path, scratch)
    os.mkdir(f"{scratch}/tmp")
    os.chmod(f"{scratch}/tmp", 0o777)
    os.chroot(scratch)
    os.chdir("/tmp")


def show(path: str, root: str) -> None:
    """Make a folder visible inside the new root, read-only; a link stays a link."""
    target = root + path
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path) and not os.path.exists(target):
        os.makedirs(target)
        mount(path, target, "", MS_BIND | MS_REC)
        mount(path, target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def cage(settings: dict[str, Any]) -> None:
    """Give away all rights, run the program, tell what became of it; never returns."""
    limits = (
        (resource.RLIMIT_AS, settings["memory_bytes"]), (resource.RLIMIT_CPU, int(settings["limit_s"]) + 1),
        (resource.RLIMIT_FSIZE, settings["scratch_bytes"]), (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, 1 << 23), (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    )  # fmt: skip
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        drop_capabilities()
        call(LIBC.prctl, "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))
        found = verdict_of(settings["program"])
        os.write(VERDICT, json.dumps(found).encode())
    finally:
        os._exit(0)


def drop_capabilities() -> None:
    """Drop what a user namespace gives its first process."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call(LIBC.capset, "capset", header, (ctypes.c_uint32 * 6)())


def verdict_of(program: str) -> dict[str, str]:
    """Run a program: "passed", or which exception it ended with."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except AssertionError as error:
        return {"outcome": "wrong answer", "detail": text_of(error)}
    except MemoryError:
        return {"outcome": "out of memory", "detail": ""}
    except BaseException as error:  # SystemExit and whatever else a stranger raises
        return {"outcome": f"raised {type(error).__name__}"[:100], "detail": text_of(error)}
    return {"outcome": "passed", "detail": ""}


def text_of(error: BaseException) -> str:
    """Return the text of an exception, whose own method may do anything."""
    try:
        return str(error)[:200]
    except BaseException:
        return ""


def wait(inside: int, read: int, limit_s: float) -> dict[str, str]:
    """Read the verdict, at most so long, then end the cage with everything in it."""
    ready, _, _ = select.select([read], [], [], limit_s)
    data = os.read(read, LARGEST_VERDICT_BYTES) if ready else b""
    os.kill(inside, signal.SIGKILL)  # one that has ended keeps the status that it had
    _, status = os.waitpid(inside, 0)
    if not ready:
        return {"outcome": "out of time", "detail": f"{limit_s:g} s"}
    if not data:
        by_signal = os.WIFSIGNALED(status)
        how = f"by {signal.Signals(os.WTERMSIG(status)).name}" if by_signal else f"with {os.WEXITSTATUS(status)}"
        return {"outcome": "ended without a verdict", "detail": how}
    try:
        found = json.loads(data)
        return {"outcome": str(found["outcome"])[:200], "detail": str(found["detail"])[:200]}
    except (ValueError, KeyError, TypeError):
        return {"outcome": "ended without a verdict", "detail": "it wrote something else"}


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2). Raises OSError."""
    call(LIBC.mount, f"mount {target}", *map(os.fsencode, (source, target, kind)), flags, os.fsencode(data))


def call(function: Any, name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError that names it."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
