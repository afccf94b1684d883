"""Supervised fine-tuning beside TRL's SFTTrainer: the same chats, template and weights, losses of 50 steps.

TRL pads every conversation to a row of its own and finds the answers by transformers' assistant masks; we pack several
into a row and read the bits of the store. All chats are one batch, so no order of samples matters. Needs the extra
`peers`: pip install -e '.[peers]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_chats import base, chats, conversations, finetuning, run

from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.config.schema import OptimizerConfig
from hpcllm.data.packing import SplitArrays, make_rows
from hpcllm.data.store import TokenStore
from hpcllm.optim.adamw import learning_rate

STEPS, CHATS = 50, 24


def losses_of_trl(folder: Path, rows: list[dict[str, Any]], optimizer: OptimizerConfig, out: Path) -> list[float]:
    """Losses of TRL's trainer on all rows a step, from the weights, tokenizer and template of a Hugging Face folder."""
    import datasets
    import transformers
    import trl

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    settings = trl.SFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=len(rows),
        assistant_only_loss=True,
        max_length=None,
        max_grad_norm=optimizer.clip_norm,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    adamw = torch.optim.AdamW(
        model.parameters(), 1.0, (optimizer.beta1, optimizer.beta2), optimizer.epsilon, optimizer.weight_decay
    )
    rates = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: learning_rate(step, STEPS, optimizer))
    trainer = trl.SFTTrainer(
        model,
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(adamw, rates),
    )
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.full(reason="TRL trains beside it, a quarter of a minute")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_losses_of_50_steps_are_those_of_trl(template, tmp_path):
    pytest.importorskip("trl", reason="needs the extra `peers`", exc_type=ImportError)
    convert(base(template), tmp_path / "weights", None)
    store = TokenStore.open(chats(template, CHATS, 0.0))
    assert store.header.documents["train"] == CHATS
    rows = make_rows(SplitArrays.of(store, "train"), 400, "best-fit", True).count
    assert 2 * rows < CHATS
    config = finetuning(
        template,
        run={"name": f"trl {template}", "start_from": str(tmp_path / "weights"), "steps": STEPS},
        data={"store": str(store.path), "global_batch": rows},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 5, "weight_decay": 0.0},
        pipeline={"microbatches": 1},
    )
    ours = [record["loss"] for record in run(config, MPI.COMM_SELF, restart=True)]
    theirs = losses_of_trl(tmp_path / "weights", conversations(CHATS), config.optimizer, tmp_path / "out")
    assert ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
