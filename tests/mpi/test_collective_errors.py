"""What one rank finds out, all ranks know: the same value, or the same error of the same type."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import hpcllm
from hpcllm import errors
from hpcllm.errors import CollectiveError, ConfigError, DataError, HpcllmError
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed

OPTIONAL = ("lm_eval",)
KINDS = sorted((kind for kind in vars(errors).values() if isinstance(kind, type)), key=lambda kind: kind.__name__)


def fail(error: Exception) -> None:
    raise error


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(sub) for sub in kind.__subclasses__()))


def test_all_errors_of_the_package_live_in_one_file_where_the_other_side_looks_them_up():
    for module in pkgutil.walk_packages(hpcllm.__path__, "hpcllm."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
    assert subclasses(HpcllmError) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_follow_from_the_type_and_no_type_is_known_to_be_everywhere(kind):
    assert kind.exit_code == (2 if issubclass(kind, errors.UserError) else 1)
    assert kind("x").everywhere is False


@pytest.mark.parallel([1, 2, 3, 4])
def test_the_root_alone_does_it_and_everyone_has_the_result(comm):
    for value in (None, 0, "text", {"a": [1, 2.5]}, b"bytes"):
        callers = []
        assert on_root(comm, lambda value=value, callers=callers: callers.append(comm.rank) or value) == value
        assert callers == ([0] if comm.rank == 0 else [])


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_root_has_its_type_message_and_exit_code_everywhere(comm, kind):
    with pytest.raises(HpcllmError) as raised:
        on_root(comm, lambda: fail(kind("größe = 3, valid: 4")))
    assert (type(raised.value), str(raised.value)) == (kind, "größe = 3, valid: 4")
    assert raised.value.everywhere
    assert raised.value.exit_code == kind.exit_code


@pytest.mark.parallel([1, 2, 3, 4])
def test_an_error_of_the_file_system_reaches_everyone_and_the_communicator_stays_usable(comm):
    with pytest.raises(CollectiveError, match=r"FileNotFoundError.*no such place"):
        on_root(comm, lambda: Path("/no such place").read_text())
    assert comm.allreduce(1) == comm.size


@pytest.mark.parallel(1)
def test_an_error_that_nobody_foresaw_is_not_hidden(comm):
    with pytest.raises(ZeroDivisionError):
        on_root(comm, lambda: 1 // 0)


@pytest.mark.parallel([1, 2, 3, 4])
def test_nobody_fails_if_nobody_failed(comm):
    raise_if_any_failed(comm, None)


@pytest.mark.parallel([1, 2, 3, 4])
def test_any_set_of_failing_ranks_fails_all_and_the_first_three_are_named(comm):
    for chosen in range(1, 2**comm.size):
        failing = [rank for rank in range(comm.size) if chosen >> rank & 1]
        mine = DataError(f"file {comm.rank} is cut") if comm.rank in failing else None
        with pytest.raises(DataError) as raised:
            raise_if_any_failed(comm, mine)
        said = "; ".join(f"rank {rank}: file {rank} is cut" for rank in failing[:3])
        more = "; ..." if len(failing) > 3 else ""
        assert str(raised.value) == f"{len(failing)} of {comm.size} ranks failed: {said}{more}"
        assert raised.value.__cause__ is mine
        assert raised.value.everywhere


@pytest.mark.parallel([1, 2, 3, 4])
def test_what_all_ranks_say_is_said_once(comm):
    ranks = f"ranks 0-{comm.size - 1}" if comm.size > 1 else "rank 0"
    with pytest.raises(ConfigError, match=rf"{comm.size} of {comm.size} ranks failed: {ranks}: no such key$"):
        raise_if_any_failed(comm, ConfigError("no such key"))


@pytest.mark.parallel([2, 3, 4])
def test_different_errors_are_one_collective_error(comm):
    mine = [ConfigError("key"), DataError("file"), None, None][comm.rank]
    with pytest.raises(CollectiveError, match=r"2 of \d ranks failed: rank 0: key; rank 1: file"):
        raise_if_any_failed(comm, mine)


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_foreign_error_keeps_its_name_in_the_message(comm):
    with pytest.raises(CollectiveError, match=r"rank 0: MemoryError: 5 GiB"):
        raise_if_any_failed(comm, MemoryError("5 GiB") if comm.rank == 0 else None)
