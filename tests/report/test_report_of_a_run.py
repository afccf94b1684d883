"""The report of a run that was: all that it shows is there, and it says what the log says."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_runs
from pages import SECTIONS, Page, page_of

from hpcllm.cli.main import main
from hpcllm.report.facts import facts
from hpcllm.report.run_folder import read_runs
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train


@pytest.mark.parallel([1, 2])
def test_a_run_that_was_made_has_every_section(comm):
    folder = small_runs.store().parent / f"runs to report on {comm.size}"
    for steps in (4, 6):
        config = small_runs.tiny(
            run={"name": "a <run>", "folder": str(folder), "steps": steps, "machine": "lumi-c"},
            mesh={"pp": comm.size},
            pipeline={"microbatches": 2},
            log={"every_steps": 1, "validation_every_steps": 2, "trace_steps": (3,)},
            checkpoint={"every_steps": 2},
        )
        with StopSignals() as signals:
            summary = train(config, comm, signals)
    comm.Barrier()
    if comm.rank:
        return
    path = Path(config.run.folder) / config.run.name
    headings = Page(page_of(path)).headings
    assert [heading for heading in headings if heading != "Pipeline"] == list(SECTIONS)
    assert "Pipeline" in headings
    found = facts(read_runs([path])[0])
    assert found["state"] == "finished: 6 of 6 steps"
    assert (found["starts"], found["ranks"], found["mesh"]["pp"]) == (2, comm.size, comm.size)
    assert found["loss"] == summary.loss
    assert found["validation_loss"] == summary.validation.loss
    assert found["node_hours"] == summary.taken["node_hours"]
    assert ("forward" in found.get("traffic", {})) == (comm.size > 1)
    assert found["median_mfu"] > 0
    stages = read_runs([path])[0].history.memory[-1]["memory_stages"]
    assert len(stages) == comm.size


@pytest.mark.parametrize("loss", ["1e+308", "-1e308", "Infinity", "NaN", "1" + "0" * 400])
def test_a_log_of_any_loss_is_a_page(tmp_path, loss):
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {k}, "loss": {loss if k else 2.0}}}\n' for k in range(3)))
    assert main(["report", str(tmp_path), f"--output={tmp_path / 'page.html'}"]) == 0
