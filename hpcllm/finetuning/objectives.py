"""Objective of a run by its run file: finetuning.kind -> what the training loop learns.

none, supervised    training/objective.py    the next token
dpo                 preferences.py           which of two answers is the better one
grpo                grpo.py                  what a function rewards
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcllm.config.schema import Config, RewardConfig
from hpcllm.finetuning.grpo import Grpo
from hpcllm.finetuning.preferences import Preferences
from hpcllm.finetuning.reward_process import RewardProcess, Scored, exact
from hpcllm.training.objective import NEXT_TOKEN, Objective


def objective_of(config: Config, process: RewardProcess | None = None) -> Objective:
    """Return the objective of a run. process: that calls the function of rewards, where that is of a file."""
    finetuning = config.finetuning
    if finetuning.kind == "dpo":
        return Preferences(finetuning.beta)
    if finetuning.kind != "grpo":
        return NEXT_TOKEN
    if not finetuning.reward.file:
        return Grpo(finetuning.reward, _exact)
    assert process, "a function of a file is called by a process"
    return Grpo(finetuning.reward, process.rewards)


def _exact(_: RewardConfig, rows: Sequence[Scored]) -> list[float]:
    return exact(rows)
