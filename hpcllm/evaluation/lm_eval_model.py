"""A model of ours inside lm-evaluation-harness: its tasks and figures, our weights and log-likelihoods.

    from hpcllm.evaluation.lm_eval_model import HpcllmModel
    lm_eval.simple_evaluate(model=HpcllmModel("runs/small"), tasks=["my_task"])
    python -m hpcllm.evaluation.lm_eval_model --model hpcllm --model_args path=runs/small --tasks my_task

    lm_eval: tasks, prompts, metrics --> texts --> tokens --> scoring.py, one process --> log-likelihoods --> lm_eval

Importing this file registers the model as "hpcllm". Tested with lm-eval 0.4.13; needs the extra `peers`. Its task files
name data on the network or local files; the latter work without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hpcllm.checkpoint.huggingface.folder import which
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import ConfigError
from hpcllm.evaluation.batches import BATCH_TOKENS, Request, batches_of_requests, check_lengths
from hpcllm.evaluation.evaluate import about_model
from hpcllm.evaluation.examples import requests_of_pairs
from hpcllm.evaluation.scoring import Score, Scorer
from hpcllm.inference.generate import load_model
from hpcllm.system.device import choose_device, torch_dtype


@register_model("hpcllm")
class HpcllmModel(LM):  # type: ignore[misc]
    """Model of lm-evaluation-harness with the weights of a checkpoint, a run folder or a Hugging Face folder."""

    def __init__(
        self,
        path: str | Path,
        precision: str = "fp32",
        device: str | None = "auto",
        batch_tokens: int = BATCH_TOKENS,
        **_: Any,  # what lm_eval hands to every model: batch_size and the like
    ) -> None:
        """Load a model into this process. Raises UserError, CheckpointError."""
        super().__init__()
        found, is_folder = which(Path(path))
        self.about = about_model(found, is_folder)
        self.encoder = Encoder(self.about.tokenizer_json)
        place = choose_device({"cuda": "gpu", None: "auto"}.get(device, str(device)))
        self.decoder = load_model(found, is_folder, torch_dtype(precision), place, None)
        self.scorer, self.batch_tokens = Scorer([self.decoder]), int(batch_tokens)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm_eval caches requests."""
        return "hpcllm"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Return log-likelihood, and whether it is the greedy one, of each request's (context, continuation)."""
        pairs = [request.args for request in requests]
        scores = self._scores(requests_of_pairs(pairs, self.encoder, self.about.model.vocabulary))
        return [(-score.nats, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Return the log-likelihood of each request's text, in windows that follow one another."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        scores = iter(self._scores([each for of_text in windows for each in of_text]))
        return [-sum(next(scores).nats for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Raise ConfigError: tasks that generate are not run by this model."""
        raise ConfigError(
            f"{len(requests)} requests of lm_eval are to generate; valid: tasks of output_type multiple_choice, "
            "loglikelihood or loglikelihood_rolling"
        )

    def _scores(self, requests: list[Request]) -> list[Score]:
        check_lengths(requests, self.about.model.max_sequence)
        batches = batches_of_requests(requests, self.about.model.max_sequence, self.batch_tokens)
        return self.scorer.scores(batches, len(requests))

    def _windows(self, text: str) -> Iterator[Request]:
        ids = self.encoder.encode([text])[0].tolist()[:-1]  # encode closes a document
        prefix = [*self.encoder.beginning, self.encoder.end_of_text][0]
        most = self.about.model.max_sequence
        for window in get_rolling_token_windows(ids, prefix, most, 1):
            context, continuation = make_disjoint_window(window)
            yield Request(tuple(context), tuple(continuation))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
