"""DPO gives the losses and rewards of TRL's DPOTrainer: one Hugging Face folder, the same pairs in the same order."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from preference_runs import curve, dpo

from hpcllm.data.store import TokenStore
from hpcllm.finetuning.objectives import objective_of
from hpcllm.finetuning.preferences import FIGURES
from hpcllm.optim.adamw import learning_rate
from hpcllm.training.setup import open_run

STEPS, BATCH, BETA = 50, 4, 0.3


def settings():
    """Fifty steps, in which the rewards become large."""
    return dpo(
        run={"steps": STEPS},
        data={"global_batch": BATCH},
        finetuning={"kind": "dpo", "beta": BETA},
        pipeline={"microbatches": 1},
    )


@pytest.mark.full(reason="TRL trains beside it, a tenth of a minute")
def test_losses_and_rewards_of_50_steps_are_those_of_trl(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    config = settings()
    ours = curve(config, MPI.COMM_SELF, STEPS)[:-1]
    found = theirs(config, tmp_path)
    assert ours[-10:, 0].mean() < 0.5 * ours[0, 0]
    np.testing.assert_allclose(ours[:, 0], [record["loss"] for record in found], atol=1e-4)
    np.testing.assert_allclose(ours[:, 1], [record["grad_norm"] for record in found], rtol=1e-3, atol=1e-4)
    for at, name in enumerate(FIGURES, 2):
        scale = 10 if name.startswith("logps") else 1  # sums over many tokens
        np.testing.assert_allclose(ours[:, at], [record[name] for record in found], atol=scale * 1e-4, err_msg=name)


def examples(config) -> list[dict[str, list[int]]]:
    """Pairs in the order of the run, as TRL has them after its own tokenizing; ends that do not count are cut."""
    with open_run(config, MPI.COMM_SELF, objective_of(config)) as run:
        rows = run.loader.rows
        pairs = [rows.numbers[run.loader.sampler.index(position)] for position in range(STEPS * BATCH)]
    store, found = TokenStore.open(config.data.store), []
    tokens, borders = store.tokens("train"), store.documents("train")
    for pair in pairs:
        parts = {}
        for name, document in (("chosen_ids", 2 * pair), ("rejected_ids", 2 * pair + 1)):
            first, end = (int(place) for place in borders[document : document + 2])
            places = np.flatnonzero(store.counted_of("train", first, end))
            assert (np.diff(places) == 1).all()
            parts["prompt_ids"] = tokens[first : first + places[0]].tolist()
            parts[name] = tokens[first + places[0] : first + places[-1] + 1].tolist()
        found.append(parts)
    return found


def theirs(config, folder: Path) -> list[dict[str, float]]:
    """Train with TRL; returns what it logs of each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that TRL brings
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
        from trl import DPOConfig, DPOTrainer

        class InOrder(DPOTrainer):
            """Takes tokens as they are, one after the other."""

            def _prepare_dataset(self, dataset, *_args, **_kwargs):
                return dataset

            def _get_train_sampler(self, *_args):
                return torch.utils.data.SequentialSampler(self.train_dataset)

        model = AutoModelForCausalLM.from_pretrained(config.run.start_from, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(config.run.start_from) / "tokenizer.json"))
        tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        options = config.optimizer
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=1.0,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, STEPS, options))
        arguments = DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            beta=BETA,
            max_length=None,
            max_grad_norm=options.clip_norm,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = InOrder(
            model=model,
            args=arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(examples(config)),
            optimizers=(optimizer, schedule),
        )
        trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]
