"""A training run of the project's decoder that is ended and resumed, beside one that is not: the same bits.

steps   1   2   3   4   5        its states are spread over the ranks, as ZeRO has them; a checkpoint has a part of
        1   2 |save              the parameters and of both moments from each rank
              |load 3   4   5    what resumes begins with other weights, and has nothing but the file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.zero import ours
from hpcllm.course.labs.zero.trained import CONFIG, STEPS, batches, loss_and_gradients, made
from hpcllm.model.transformer import Decoder

Values = NDArray[np.float32]
SAVED_STEP = 2


@dataclass
class Training:
    """One rank of a run. flat: all parameters; state: the moments of the own range."""

    comm: MPI.Intracomm
    decoder: Decoder
    flat: Values
    state: dict[str, Values]

    @classmethod
    def begin(cls, seed: int, comm: MPI.Intracomm) -> Training:
        decoder = made(seed)
        flat = parameters_to_vector(decoder.parameters()).detach().numpy().copy()
        return cls(comm, decoder, flat, ours.new_state(flat.size, comm))

    def parts(self) -> dict[str, Values]:
        """Return this rank's part of all that a run has to keep."""
        start, end = ours.own_range(self.flat.size, self.comm)
        return {"parameters": self.flat[start:end].copy(), **{name: each.copy() for name, each in self.state.items()}}

    def take(self, parts: Mapping[str, Values]) -> None:
        """Go on from parts, however they are cut. Collective over the run's ranks."""
        whole = {name: np.concatenate(self.comm.allgather(part)) for name, part in parts.items()}
        self.flat = whole.pop("parameters")
        start, end = ours.own_range(self.flat.size, self.comm)
        self.state = {name: array[start:end].copy() for name, array in whole.items()}

    def train(self, seed: int, first: int, last: int) -> None:
        """Make the steps first to last, on the batches of these steps."""
        for step, tokens in enumerate(batches(seed, self.comm.size), start=1):
            if first <= step <= last:
                vector_to_parameters(torch.from_numpy(self.flat), self.decoder.parameters())
                loss_and_gradients(self.decoder, tokens[self.comm.rank])
                ours.update(self.flat, self._gradients(), self.state, step, CONFIG, self.comm)

    def _gradients(self) -> Values:
        gradients: Values = parameters_to_vector([_gradient(p) for p in self.decoder.parameters()]).numpy()
        return gradients


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "every parameter has one"
    return parameter.grad


def check_resumed(trial: Trial, folder: Any) -> None:
    """Compare every bit of the two runs. Raises LawError on all ranks that see a difference."""
    comm, seed = trial.control, trial.case["seed"]
    whole = Training.begin(seed, comm)
    whole.train(seed, 1, STEPS)
    begun = Training.begin(seed, comm)
    begun.train(seed, 1, SAVED_STEP)
    trial.student.save(trial.comm, folder, SAVED_STEP, begun.parts())
    resumed = Training.begin(seed + 1, comm)
    step, parts = trial.student.load(trial.comm, folder)
    resumed.take(parts)
    resumed.train(seed, step + 1, STEPS)
    wanted = whole.parts()
    wrong = [name for name, part in resumed.parts().items() if part.tobytes() != wanted[name].tobytes()]
    if found := sorted({name for names in comm.allgather(wrong) for name in names}):
        raise LawError("resumed", f"{comm.size} ranks: after step {STEPS} other bits in {', '.join(found)}")
