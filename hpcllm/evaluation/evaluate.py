"""A model and tasks -> results, in one process or on dp x tp x pp ranks: `hpcllm evaluate`, without its printing.

rank 0   names -> files, examples, tokens      all wrong input is found here, before weights are read
all      weights, once for each replica; tokens from rank 0; batches dealt over replicas
rank 0   figures                               measuring.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.checkpoint.huggingface.folder import which
from hpcllm.evaluation.measuring import measure, prepare
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import Options, Progress, about_model
from hpcllm.evaluation.tasks import Result, TaskName
from hpcllm.inference.generate import load_model
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.device import choose_device, take_device, torch_dtype

if TYPE_CHECKING:
    from hpcllm.evaluation.judge_process import JudgeProcess
    from hpcllm.mpi.mesh import Mesh


def evaluate(
    path: Path,
    tasks: Sequence[TaskName],
    options: Options,
    mesh: Mesh | None,
    progress: Progress,
    judge: JudgeProcess | None = None,
) -> list[Result]:
    """Measure a model by each task. Collective over the mesh; None: one process, without MPI.

    path: a checkpoint, a run folder for its newest, or a Hugging Face folder. judge: process of this rank that runs
    programs, for tasks of code. Returns the results on rank 0, [] on others. Raises UserError before weights are read,
    CheckpointError, NonFiniteError, StallError.
    """
    comm = mesh.world if mesh else None
    place = take_device(options.device, mesh.world, mesh.node).device if mesh else choose_device(options.device)
    path, is_folder = on_root(comm, lambda: which(path))
    about = on_root(comm, lambda: about_model(path, is_folder))
    prepared = [prepare(task, about, options, comm, judge) for task in tasks]
    scorer = Scorer([load_model(path, is_folder, torch_dtype(options.precision), place, mesh)], mesh)
    found = [measure(scorer, each, options.batch_tokens, progress) for each in prepared]
    return [result for result in found if result is not None]


def measure_alike(path: Path, task: TaskName, options: Options, progress: Progress) -> Callable[[Path], Result]:
    """Return a function that measures models by a task as it is cut for the one at the path. In one process.

    They have its shape and tokenizer. Raises UserError, CheckpointError; the function NonFiniteError as well.
    """
    place = choose_device(options.device)
    prepared = prepare(task, about_model(*which(path)), options, None)

    def measure_one(other: Path) -> Result:
        scorer = Scorer([load_model(*which(other), torch_dtype(options.precision), place, None)], None)
        result = measure(scorer, prepared, options.batch_tokens, progress)
        assert result is not None, "there is one process"
        return result

    return measure_one
