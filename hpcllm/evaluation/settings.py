"""Settings of an evaluation, and what is known of a model before its weights are read.

--task, --limit, --seed, ...  [evaluation]   --> Options --+
run file, config.json, tokenizer beside weights --> About -+--> input of all tasks, checked --> weights --> figures
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from hpcllm.checkpoint.huggingface.folder import read_contents
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.state import facts
from hpcllm.config.schema import DataConfig, ModelConfig, from_tables
from hpcllm.data.model_texts import model_texts
from hpcllm.errors import CheckpointError, ConfigError
from hpcllm.evaluation.batches import BATCH_TOKENS
from hpcllm.evaluation.sandbox import Limits
from hpcllm.evaluation.scoring import Advance

FOLDER_SEQUENCE = 1024  # tokens of a row where no run says it, if the model reads as many
USUAL_TOKENS = 256  # of a text that a model makes, where nothing else is said
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # (task, batches) -> while it runs


@dataclass(frozen=True)
class CodeOptions:
    """Settings of tasks whose answers are programs."""

    samples: int = 1  # texts of each problem
    temperature: float | None = None  # None: that of the likeliest text for one sample
    k: tuple[int, ...] = (1,)  # of pass@k
    limits: Limits = field(default_factory=Limits)  # of each program


@dataclass(frozen=True)
class Options:
    """Settings of an evaluation; precision, device and batch_tokens change figures by rounding alone."""

    problems: int = 200  # of a task that is made
    seed: int = 0  # of them, and of the draws of shots
    limit: int | None = None  # examples of a file, rows of a store; None: all
    shots: int = 0  # examples with their answers in front of each
    shots_from: Path | None = None  # file that they come from; None: the other rows of the same file
    tokens: int | None = None  # of a text that is made; None: as many as usual
    code: CodeOptions = field(default_factory=CodeOptions)
    precision: str = "fp32"
    device: str = "auto"
    batch_tokens: int = BATCH_TOKENS


@dataclass(frozen=True)
class About:
    """Facts of a model that are known before its weights are read."""

    model: ModelConfig
    data: DataConfig  # how a store is laid out
    tokenizer_json: str

    def check_texts(self) -> None:
        """Raise CheckpointError unless the model can read texts."""
        if not self.tokenizer_json:
            raise CheckpointError("the model has no tokenizer beside its weights, so it cannot read texts")

    def tokens_of(self, wanted: int | None, usual: int = USUAL_TOKENS) -> int:
        """Return how many tokens a text has at most, beside its prompt. Raises ConfigError if there is no room."""
        window = self.model.max_sequence
        if wanted and wanted >= window:
            raise ConfigError(f"--tokens {wanted}: the model reads {window} with the prompt; valid: 1 to {window - 1}")
        return wanted or min(usual, max(window // 2, 1))


def about_model(path: Path, is_folder: bool) -> About:
    """Read shape, tokenizer and layout of data beside weights. Not collective. Raises UserError, CheckpointError."""
    text = model_texts(path).tokenizer_json
    if is_folder:
        model = read_contents(path).model
        return About(model, DataConfig(sequence_length=min(model.max_sequence, FOLDER_SEQUENCE)), text)
    with Checkpoint.open(path) as checkpoint:
        config = from_tables(facts(checkpoint).config)
    return About(config.model, config.data, text)
