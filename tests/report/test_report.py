"""The page of a run: all sections, sound HTML, nothing from elsewhere, whatever the folder holds."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import made_up_runs as made_up
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import SECTIONS, Page, check_image, page_of

from hpcllm import plotting
from hpcllm.cli.main import main
from hpcllm.cli.report import write_page
from hpcllm.errors import DataError
from hpcllm.report import figures
from hpcllm.report.comparison import best_of
from hpcllm.report.facts import facts, progress, settled, time_split
from hpcllm.report.figures import downsample, smoothed
from hpcllm.report.run_folder import MOST_STEPS, read_log, read_runs

HOSTILE = 'a <script>alert(1)<b> & "x" $y_1$ \''


def test_a_page_has_every_section_and_its_references_lead_somewhere(tmp_path):
    folder = made_up.write(tmp_path / "a run", starts=(0, 400))
    html = page_of(folder)
    page = Page(html)
    assert tuple(page.headings) == SECTIONS
    assert page.pictures == 8
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= set(page.ids)
    for told in ("finished: 1,000 of 1,000 steps", "Slurm job 4711", "stage 3 (ranks 12-15)", "GPU-hours", "start 2"):
        assert told in page.text


def test_a_picture_differs_between_a_light_and_a_dark_page_in_its_ink_alone_and_is_the_same_each_time(tmp_path):
    run = read_runs([made_up.write(tmp_path / "r", steps=100)])[0]
    light, dark = figures.memory_bars({"all": {"parameters": 3e9, "step": 1e9}})[0].sources
    assert [light, dark] == figures.memory_bars({"all": {"parameters": 3e9, "step": 1e9}})[0].sources
    one, other = (ElementTree.tostring(check_image(source), "unicode") for source in (light, dark))
    assert one.count(plotting.INK) > 5
    assert one.replace(plotting.INK, plotting.DARK_PAGE_INK) == other
    assert plotting.DARK_PAGE_INK not in one
    assert len({figures.time_over_steps(run.history, progress(run.history, 8))[0].sources[0] for _ in range(2)}) == 1


@pytest.mark.full(reason="three pages; a sixth of a minute")
def test_what_a_user_named_is_shown_and_does_nothing(tmp_path):
    first = made_up.write(tmp_path / HOSTILE, run={"name": "r", "machine": "<b>"})
    second = made_up.write(tmp_path / f"_{HOSTILE}", seed=1.0)
    assert HOSTILE in Page(page_of(first)).text
    assert HOSTILE in Page(page_of(first, second)).text


def test_several_runs_are_compared_by_name_best_and_what_differs(tmp_path):
    first = made_up.write(tmp_path / "slow", slow=1.5)
    second = made_up.write(tmp_path / "fast", slow=0.8, optimizer={"learning_rate": 1e-2})
    html = page_of(first, second)
    assert Page(html).headings == [
        "Summary",
        "What differs in the run files",
        "Loss",
        "Throughput",
        "Gradient norm",
        "Communication",
        "Where the time goes",
        "Energy",
    ]
    differing = html[html.index("What differs in the run files</h2>") : html.index("Loss</h2>")]
    assert re.findall(r"<td>(\w+\.\w+)</td>", differing) == ["optimizer.learning_rate"]
    row = next(row for row in html.split("<tr>") if ">tokens/s, median<" in row)
    assert [("best" in cell) for cell in re.findall(r"<td class=\"([^\"]*)\"", row)] == [False, True]


@given(st.lists(st.one_of(st.none(), st.floats(), st.just("text")), max_size=6))
def test_the_best_is_the_least_or_the_most_and_none_where_all_are_equal(values):
    known = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    for better, most in (("lower", min), ("higher", max)):
        found = best_of(values, better)
        assert (found is None) == (len(set(known)) < 2)
        assert found is None or values[found] == most(known)
    assert best_of(values, "") is None


def test_a_run_that_learned_from_preferences_shows_its_figures(tmp_path):
    folder = made_up.write(tmp_path / "r")
    figures = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen")
    lines = made_up.read_lines(folder)
    for line in lines:
        if "loss" in line:
            line.update(dict.fromkeys(figures, 0.8125))
        elif "validation_loss" in line:
            line.pop("bits_per_byte")
            line.update({f"validation_{name}": 0.75 for name in figures})
    made_up.write_lines(folder, lines)
    html = page_of(folder)
    shown = Page(html)
    assert "Preferences" in shown.headings
    for words in ("0.8125", "0.7500", "nats a pair", "rewards/margins", "of held-out pairs"):
        assert words in shown.text
    assert "Preferences" not in Page(page_of(made_up.write(tmp_path / "text"))).headings


@pytest.mark.full(reason="a run that learns from rewards, a fifth of a minute")
def test_a_run_that_learned_from_rewards_shows_figures_and_texts(tmp_path):
    folder = made_up.write(tmp_path / "r")
    figures = ("reward", "groups_without_signal", "length", "cut_share", "entropy", "kl", "sampler_difference")
    lines = made_up.read_lines(folder)
    for line in lines:
        if "loss" in line:
            line.update(dict.fromkeys(figures, 0.8125))
            line["texts"] = [{"prompt": "<b>p</b> =", "text": " t\u202e", "reward": 0.25}, "no text", {"reward": "x"}]
        elif "validation_loss" in line:
            line.pop("bits_per_byte")
            line.update(validation_loss=-0.75, validation_reward=0.75, validation_length=3.5)
    made_up.write_lines(folder, lines)
    html = page_of(folder)
    shown = Page(html)
    assert "Rewards" in shown.headings
    for words in ("0.812", "0.7500", "minus the reward", "of the likeliest texts", "<b>p</b> =", "0.25"):
        assert words in shown.text
    assert "<b>p" not in html
    assert "\u202e" not in html
    for broken in ([], 3, None, [3]):
        lines[-1 if "loss" in lines[-1] else [i for i, x in enumerate(lines) if "loss" in x][-1]]["texts"] = broken
        made_up.write_lines(folder, lines)
        assert "Rewards" in Page(page_of(folder)).headings
    assert "Rewards" not in Page(page_of(made_up.write(tmp_path / "text"))).headings


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    folders = [made_up.write(tmp_path / place / "r") for place in ("a", "b")]
    names = [run.name for run in read_runs([*folders, folders[0]])]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "torn", ["", '{"step": 110, "loss": 2.', "not json\n", "[]\n", '{"loss": 1}\n', '{"step": "x"}\n']
)
def test_a_run_that_still_runs_is_reported_with_what_it_has(tmp_path, torn):
    folder = made_up.write(tmp_path / "r", steps=100, end=False)
    made_up.write_lines(folder, made_up.read_lines(folder), torn)
    run = read_runs([folder])[0]
    found = facts(run)
    assert (found["step"], len(run.history.loss[0]), len(run.history.steps)) == (100, 10, 10)
    assert run.history.broken == bool(torn)
    assert found["state"].startswith("100 of 1,000 steps; the log was last written")


def test_a_run_of_one_logged_step_is_shown_and_called_its_start_up(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=10, end=False)
    made_up.write_lines(folder, made_up.read_lines(folder), '{"step": 20, "loss": 2.')
    page = Page(page_of(folder))
    assert tuple(page.headings) == SECTIONS
    assert "That is the start-up" in page.text
    assert page.hovers[0]["steps"] == [10]


@pytest.mark.parametrize("lines", [[], [made_up.start(0), made_up.memory(1)]])
def test_a_run_without_a_step_says_so(tmp_path, lines):
    folder = made_up.write(tmp_path / "r", steps=10)
    made_up.write_lines(folder, lines)
    assert "No step has been logged yet." in page_of(folder)
    page_of(folder, folder)


def test_a_log_of_an_older_version_is_shown_as_far_as_it_goes(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=100)
    new = ("time_", "node_", "gpu_", "energy", "tokens_per_kwh", "cost", "memory_stages", "mfu")
    lines = [line for line in made_up.read_lines(folder) if "start" not in line and "end" not in line]
    old = [{key: value for key, value in line.items() if not key.startswith(new)} for line in lines]
    made_up.write_lines(folder, old)
    (folder / "run.toml").write_text('[run]\nname = "r"\n[no_table_of_ours]\nx = 1\n')
    headings = Page(page_of(folder)).headings
    assert "Loss" in headings
    assert "Energy and cost" not in headings
    page_of(folder, made_up.write(tmp_path / "new", steps=100))


def test_steps_that_overflowed_or_were_lost_are_gaps_and_counted(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=200)
    lines = made_up.read_lines(folder)
    for line in lines:
        if line["step"] in (50, 60) and "loss" in line:
            line |= {"loss": math.nan if line["step"] == 50 else math.inf, "grad_norm": None}
    made_up.write_lines(folder, lines)
    html = page_of(folder)
    assert "2 logged step(s) had gradients that overflowed" in html
    assert "2 logged step(s) had a loss that is no number" in html


def test_a_long_log_is_thinned_and_keeps_what_is_rare(tmp_path):
    lines = 3 * MOST_STEPS
    folder = made_up.write_many(tmp_path / "r", lines)
    history = read_log(folder / "log.jsonl")
    assert len(history.steps) <= MOST_STEPS + 1
    assert history.logged == len(history.loss[0]) == lines + 10
    assert history.last["step"] == 100 + lines
    assert len(history.checkpoints) + len(history.starts) + len(history.ends) + len(history.validations) == 3
    start = time.process_time()
    page_of(folder)
    assert time.process_time() - start < 20


@given(st.lists(st.floats(), min_size=1, max_size=200), st.integers(1, 50))
@example([8.99e307, 8.99e307], 1)
@example([-1.7976931348623157e308] * 3, 1)
def test_thinning_keeps_mean_least_and_most(values, most):
    found = downsample(range(len(values)), values, most)
    assert len(found.x) == min(len(values), most)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert min(filter(math.isfinite, found.low.tolist())) == min(finite)
        assert max(filter(math.isfinite, found.high.tolist())) == max(finite)
        assert np.nanmin(found.mean) >= min(finite)
        assert np.nanmax(found.mean) <= max(finite)


def test_the_time_of_a_step_adds_up_in_the_numbers_too(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=300)
    history = read_log(folder / "log.jsonl")
    parts = time_split(history)
    inside = sum(time_s for part, time_s in parts.items() if part not in ("between", "checkpoint", "validation"))
    steps = history.column("step_s")[1][1:]
    assert inside == pytest.approx(sum(steps) / len(steps))


def test_the_first_logged_step_of_each_start_counts_in_no_mean_and_no_median(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=300, starts=(0, 150))
    lines = made_up.read_lines(folder)
    for line in lines:
        if "loss" in line and line["step"] in (10, 160):
            line |= {"step_s": 1e6, "time_compute_s": 1e6, "tokens_per_s": 0.0}
    made_up.write_lines(folder, lines)
    run = read_runs([folder])[0]
    assert [record["step"] for record in settled(run.history)] == [*range(20, 160, 10), *range(170, 301, 10)]
    assert time_split(run.history)["compute"] < 10
    usual = [2.0 + 0.05 * math.sin(0.37 * record["step"]) for record in settled(run.history)]
    assert facts(run)["median_step_s"] == pytest.approx(np.median(usual))
    assert "libraries load (1,000,001 s a step)" in Page(page_of(folder)).text


def test_the_page_begins_with_what_ran_how_far_and_where_the_time_went(tmp_path):
    folder = made_up.write(tmp_path / "r", data={"store": "x/books.h5", "global_batch": 512, "sequence_length": 2048})
    words = " ".join(Page(page_of(folder)).text.split())
    head = words[: words.index("Made by hpcllm report")]
    for told in (
        "parameters (tiny) on books.h5; 16 ranks (dp=4 pp=4 tp=1) on 2 nodes, AMD Instinct MI250X (64 GB).",
        "Finished: 1,000 of 1,000 steps. 1.049 B tokens in 36.7 minutes.",
        "training loss 2.8",
        "held-out loss 2.9",
        "MFU 30.",
        "Where the time went: 58 % computing, 17 % idle by the schedule (the bubble), 9 % waiting for messages",
    ):
        assert told in head


def test_an_axis_knows_tokens_and_hours_over_all_starts(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=200, starts=(0, 100))
    lines = made_up.read_lines(folder)
    for line in lines:
        if "start" in line and line["step"] == 100:
            line["start"]["nodes"] = 4
    made_up.write_lines(folder, lines)
    found = progress(read_log(folder / "log.jsonl"), 1000)
    assert found.steps == [0.0, *range(10, 201, 10)]
    first, second = 2.2 * 100 / 3600, 2.2 * 100 / 3600 / 2  # node-hours are made up for 2 nodes
    assert found.hours[10] == pytest.approx(first)
    assert found.hours[-1] == pytest.approx(first + second)


def test_the_values_under_the_pointer_are_those_of_the_log(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=500, end=False)
    loss = Page(page_of(folder)).hovers[0]
    assert (loss["steps"], loss["tokens"], loss["unit"]) == (list(range(10, 501, 10)), 512 * 2048, "minutes")
    raw, smooth, checks = loss["panels"][0]["lines"]
    logged = [line["loss"] for line in made_up.read_lines(folder) if "loss" in line]
    assert raw[3] == pytest.approx(logged, rel=1e-4)
    assert smooth[3] == pytest.approx(smoothed(logged).tolist(), rel=1e-4)
    assert checks[2] == [100, 200, 300, 400, 500]
    left, top, right, bottom = loss["panels"][0]["box"]
    assert 0 < left < right < 1
    assert 0 < top < bottom < 1


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=200))
def test_smoothing_stays_between_the_values_and_keeps_a_line_and_the_ends(values):
    found, finite = smoothed(values), [value for value in values if math.isfinite(value)]
    assert len(found) == len(values)
    if finite:
        assert np.nanmin(found) >= min(finite) - 1e-3
        assert np.nanmax(found) <= max(finite) + 1e-3
    for end in (0, -1):
        assert found[end] == pytest.approx(values[end], abs=1e-3, nan_ok=True)
    line = np.arange(len(values), dtype=float)
    assert smoothed(line) == pytest.approx(line, abs=1e-6)


def test_text_that_generate_made_is_shown_and_other_files_are_passed_over(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=20)
    (folder / "samples").mkdir()
    good = {"prompt": "def f(", "text": f"x):\n {HOSTILE}", "tokens": 5}
    for name, content in {"a": good, "b": [1], "c": good | {"tokens": "x"}}.items():
        (folder / "samples" / f"{name}.json").write_text(json.dumps(content))
    (folder / "samples" / "torn.json").write_text('{"prompt": ')
    page = Page(page_of(folder))
    assert f"def f(x):\n {HOSTILE}" in page.text
    assert [len(page.text.split(f"{name}: 5 tokens")) for name in "abc"] == [2, 1, 1]


def test_a_folder_that_is_no_run_is_refused_with_what_would_be_one(tmp_path, capsys):
    made_up.write(tmp_path / "good", steps=10)
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "nowhere", "good/run.toml"):
        assert main(["report", str(tmp_path / wrong)]) == 2
        assert "valid:" in capsys.readouterr().err
    with pytest.raises(DataError, match="good"):
        read_runs([tmp_path / "nowhere"])


def test_the_command_writes_where_it_says_and_json_says_the_same_numbers(tmp_path, monkeypatch, capsys):
    folder = made_up.write(tmp_path / "a run")
    assert main(["report", str(folder)]) == 0
    assert (folder / "report" / "index.html").exists()
    assert str(folder / "report" / "index.html") in capsys.readouterr().out
    assert main(["report", str(folder), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["step"], numbers["energy_scope"]) == (1000, "whole nodes (pm_counters)")
    assert numbers["traffic"]["gradients"]["ratio"] == pytest.approx(3.97)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a run", str(folder), "--log-x"]) == 0
    assert Path("report.html").exists()
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []
    assert main(["report", str(folder), "--output", str(tmp_path / "no folder" / "r.html")]) == 2


@pytest.mark.full(reason="a run and two pages; a sixth of a minute")
def test_a_run_that_ends_with_its_page_says_where_it_is_and_what_opens_it(tmp_path, monkeypatch):
    folder = made_up.write(tmp_path / "a run", steps=20)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    told = [f"report: {folder}/report/index.html"]
    assert write_page(folder) == told
    assert Page((folder / "report" / "index.html").read_text(encoding="utf-8")).headings
    monkeypatch.setenv("DISPLAY", ":0")
    assert write_page(folder) == [*told, f"to open it: xdg-open '{folder}/report/index.html'"]


def test_a_report_needs_neither_mpi_nor_torch_and_without_matplotlib_has_its_tables(tmp_path):
    folder = made_up.write(tmp_path / "r", steps=20)
    code = (
        "import sys; from hpcllm.cli.main import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'mpi4py', 'numba'} & set(sys.modules)), code)"
    )
    run = [sys.executable, "-c", code, "report", str(folder)]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.endswith("[] 0\n")
    without = "import sys; sys.modules['matplotlib'] = None; " + code
    told = subprocess.run([*run[:2], without, *run[3:]], capture_output=True, text=True, check=True)
    assert told.stdout.endswith("[] 0\n")
    page = Page((folder / "report" / "index.html").read_text(encoding="utf-8"))
    assert page.pictures == 0
    assert set(SECTIONS) - {"Learning rate and gradient norm", "Throughput"} <= set(page.headings)
    for text in (told.stderr, page.text):
        assert text.count("pip install matplotlib") == 1
