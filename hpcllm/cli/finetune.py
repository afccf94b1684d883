"""The command `finetune`: the loop of `train` on chats, preferences or rewards, begun with weights of run.start_from.

                      finetuning.kind   run.start_from   store of kind                      learned
    train             "none"            may be set       text, chat                         each target alike
    finetune          "supervised"      needed           chat: answers; text: every token   to write what is there
                      "dpo"             needed           preferences                        to prefer what was chosen
                      "grpo"            needed           text, chat: its tokenizer          to write what is rewarded

Options, exit codes and run folder are those of `train`; a second `finetune` goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse

from hpcllm.cli.train import add_options
from hpcllm.cli.train import run as train
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError, UserError

TRAIN = "`hpcllm train` trains without it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, which are those of train."""
    parser.description = (
        "Fine-tune the weights of run.start_from as finetuning.kind says: on the answers of chats (supervised), on "
        "preferences (dpo), or on rewards of its own texts (grpo). On a run folder with a checkpoint it goes on from "
        "the newest one."
    )
    add_options(parser, check)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune; or with --dry-run or --is-finished only look. Raises UserError."""
    if not _has_reward_file(arguments):
        return train(arguments)
    from hpcllm.finetuning.reward_process import open_reward_process

    with open_reward_process() as rewards:  # now: once MPI has started no process may be

        def check_function(config: Config) -> None:
            check(config)
            if config.finetuning.reward.file:
                rewards.check(config.finetuning.reward)

        arguments.check = check_function
        return train(arguments, rewards)


def _has_reward_file(arguments: argparse.Namespace) -> bool:
    """Return True if the run may need a process for rewards, before rank 0 has checked the run file."""
    from hpcllm.config.schema import load

    try:
        if not arguments.run.is_file():  # a pipe can be read only once
            return not arguments.is_finished
        return bool(load(arguments.run, arguments.overrides).finetuning.reward.file) and not arguments.is_finished
    except (UserError, OSError, ValueError):
        return False  # what is wrong is said by rank 0


def check(config: Config) -> None:
    """Raise ConfigError unless the run file is of a fine-tuning."""
    if config.finetuning.kind == "none":
        raise ConfigError(
            "finetuning.kind is 'none'; valid: 'supervised', on chats, 'dpo', on preferences, or 'grpo', on rewards of "
            f"its own texts; {TRAIN}"
        )
    if not config.run.start_from:
        raise ConfigError(
            "run.start_from is missing: a Hugging Face folder, checkpoint or run folder whose weights finetune begins "
            f"with; {TRAIN}, from new weights"
        )
