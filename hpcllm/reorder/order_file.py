"""The file by which Cray MPICH gives its ranks other seats: a list of ranks, in the order of the slots.

    MPICH_RANK_REORDER_METHOD=3 MPICH_RANK_REORDER_FILE=FILE, by default MPICH_RANK_ORDER in the working directory
    0,1,8,9       slots 0 to 3 get ranks 0, 1, 8, 9       lines may end anywhere; # begins a comment

Slots are counted in Slurm's block distribution; what is near them, cores and the one device that each sees, is bound to
the slot (SLURM_LOCALID), whoever sits there. Not run by us on a Cray. Sources: LUMI training material, "Process and
thread distribution and binding" (rank reordering); ARCHER and NERSC pages on grid_order, whose output is such a file.
Reported of cray-mpich 9.1.0 on Perlmutter: MPI_Init fails with such files from 16 to 32 nodes on, as what its process
manager says of the placement grows past 1024 bytes. mesh.order and srun --distribution need no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcllm.errors import ConfigError

DEFAULT = "MPICH_RANK_ORDER"


def text(ranks: Sequence[int], per_node: int, about: Sequence[str]) -> str:
    """A line a node, below comments."""
    nodes = [ranks[start : start + per_node] for start in range(0, len(ranks), per_node)]
    return "".join([*(f"# {line}\n" for line in about), *(",".join(map(str, node)) + "\n" for node in nodes)])


def read(content: str) -> list[int]:
    """The inverse of text. Raises ValueError if it is no list of all ranks."""
    lines = (line.split("#")[0] for line in content.splitlines())
    ranks = [int(word) for word in ",".join(lines).replace(",", " ").split()]
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"{len(ranks)} numbers are not the ranks 0 to {len(ranks) - 1}, each once")
    return ranks


def write(path: Path, content: str) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(content, encoding="ascii")
    except OSError as error:
        raise ConfigError(f"the rank order file {str(path)!r} cannot be written: {error.strerror or error}") from error
