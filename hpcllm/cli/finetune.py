"""The command `finetune`: the loop of `train` on chats or preferences, begun with the weights of run.start_from.

                      finetuning.kind   run.start_from   store of kind                      learned
    train             "none"            may be set       text, chat                         each target alike
    finetune          "supervised"      needed           chat: answers; text: every token   to write what is there
                      "dpo"             needed           preferences                        to prefer what was chosen

Options, exit codes and run folder are those of `train`; a second `finetune` goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse

from hpcllm.cli.train import add_options
from hpcllm.cli.train import run as train
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError

TRAIN = "`hpcllm train` trains without it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, which are those of train."""
    parser.description = (
        "Fine-tune the weights of run.start_from as finetuning.kind says: on the answers of chats (supervised), or on "
        "preferences (dpo). On a run folder with a checkpoint it goes on from the newest one."
    )
    add_options(parser, check)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune; or with --dry-run or --is-finished only look. Raises UserError."""
    return train(arguments)


def check(config: Config) -> None:
    """Raise ConfigError unless the run file is of a fine-tuning."""
    if config.finetuning.kind == "none":
        raise ConfigError(
            f"finetuning.kind is 'none'; valid: 'supervised', on chats, or 'dpo', on preferences; {TRAIN}"
        )
    if not config.run.start_from:
        raise ConfigError(
            "run.start_from is missing: a Hugging Face folder, checkpoint or run folder whose weights finetune begins "
            f"with; {TRAIN}, from new weights"
        )
