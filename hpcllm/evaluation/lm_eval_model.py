"""A model of ours inside lm-evaluation-harness: its tasks and figures, our weights and log-likelihoods.

    from hpcllm.evaluation.lm_eval_model import HpcllmModel
    lm_eval.simple_evaluate(model=HpcllmModel("runs/small"), tasks=["my_task"])
    python -m hpcllm.evaluation.lm_eval_model --model hpcllm --model_args path=runs/small --tasks my_task

    lm_eval: tasks, prompts, metrics --> texts --> tokens --+--> scoring.py ------> log-likelihoods --+--> lm_eval
                                                            +--> generating.py ---> texts ------------+   one process

Importing this file registers the model as "hpcllm". Tested with lm-eval 0.4.13; needs the extra `peers`. Its task files
name data on the network or local files; the latter work without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hpcllm.checkpoint.huggingface.folder import which
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import ConfigError
from hpcllm.evaluation.batches import BATCH_TOKENS, Request, batches_of_requests, check_lengths
from hpcllm.evaluation.example_tokens import prompts_of, requests_of_pairs
from hpcllm.evaluation.generating import GREEDY, Prompts, make_texts
from hpcllm.evaluation.scoring import Score, Scorer
from hpcllm.evaluation.settings import USUAL_TOKENS, about_model
from hpcllm.inference.generate import load_model
from hpcllm.model.sampling import Sampling, seed_of
from hpcllm.system.device import choose_device, torch_dtype

MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm_eval's names, in its order


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
        """Return the text that follows each request's context, up to a stop string of its settings.

        Draws, where the settings want any, depend on the number of the request alone. Raises ConfigError for settings
        out of range.
        """
        alike: dict[tuple[int, Sampling], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_drawing(request.args[1], self.about.model.max_sequence), []).append(number)
        found = [""] * len(requests)
        for (most, sampling), numbers in alike.items():
            prompts = self._prompts([requests[number].args for number in numbers], numbers, most)
            for number, text in zip(numbers, make_texts(self.scorer, prompts, self.encoder, sampling), strict=True):
                found[number] = text
        return found

    def _prompts(self, asked: Sequence[tuple[str, Mapping[str, Any]]], numbers: Sequence[int], most: int) -> Prompts:
        tokens = prompts_of([context for context, _ in asked], self.encoder, self.about.model.vocabulary)
        stops = [_stops(settings) for _, settings in asked]
        sets = list(dict.fromkeys(stops))
        seeds = [seed_of(0, number) for number in numbers]
        return Prompts(tokens, sets, [sets.index(each) for each in stops], most, seeds)

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


def _drawing(settings: Mapping[str, Any], window: int) -> tuple[int, Sampling]:
    """Return most tokens of a text, and how they are drawn, from lm_eval's settings. Raises ConfigError."""
    most = int(next((settings[key] for key in MOST_TOKENS if settings.get(key) is not None), USUAL_TOKENS))
    if not 0 < most < window:
        raise ConfigError(f"max_gen_toks is {most}, the model reads {window} with the prompt; valid: 1 to {window - 1}")
    temperature = float(settings.get("temperature") or settings.get("do_sample") or 0)
    if settings.get("do_sample") is False or not temperature:
        return most, GREEDY
    top_k, top_p, min_p = (settings.get(key) or usual for key, usual in (("top_k", 0), ("top_p", 1), ("min_p", 0)))
    sampling = Sampling(temperature, int(top_k), float(top_p), float(min_p))
    sampling.check()
    return most, sampling


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    until = settings.get("until") or ()
    return tuple(each for each in ((until,) if isinstance(until, str) else until) if each)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
