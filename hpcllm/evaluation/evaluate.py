"""A model and tasks -> results, in one process or on dp x tp x pp ranks: `hpcllm evaluate`, without its printing.

rank 0   names -> files, examples, tokens      all wrong input is found here, before weights are read
all      weights, once for each replica; tokens from rank 0; batches dealt over replicas
rank 0   figures                               measuring.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.checkpoint.huggingface.folder import read_contents, which
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.state import facts
from hpcllm.config.schema import DataConfig, from_tables
from hpcllm.data.model_texts import model_texts
from hpcllm.evaluation.measuring import About, Options, Progress, measure, prepare
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.tasks import Result, TaskName
from hpcllm.inference.generate import load_model
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.device import choose_device, take_device, torch_dtype

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh

FOLDER_SEQUENCE = 1024  # tokens of a row where no run says it, if the model reads as many


def evaluate(
    path: Path, tasks: Sequence[TaskName], options: Options, mesh: Mesh | None, progress: Progress
) -> list[Result]:
    """Measure a model by each task. Collective over the mesh; None: one process, without MPI.

    path: a checkpoint, a run folder for its newest, or a Hugging Face folder. Returns the results on rank 0, [] on
    others. Raises UserError before weights are read, CheckpointError, NonFiniteError, StallError.
    """
    comm = mesh.world if mesh else None
    place = take_device(options.device, mesh.world, mesh.node).device if mesh else choose_device(options.device)
    path, is_folder = on_root(comm, lambda: which(path))
    about = on_root(comm, lambda: about_model(path, is_folder))
    prepared = [prepare(task, about, options, comm) for task in tasks]
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


def about_model(path: Path, is_folder: bool) -> About:
    """Read shape, tokenizer and layout of data beside weights. Not collective. Raises UserError, CheckpointError."""
    text = model_texts(path).tokenizer_json
    if is_folder:
        model = read_contents(path).model
        return About(model, DataConfig(sequence_length=min(model.max_sequence, FOLDER_SEQUENCE)), text)
    with Checkpoint.open(path) as checkpoint:
        config = from_tables(facts(checkpoint).config)
    return About(config.model, config.data, text)
