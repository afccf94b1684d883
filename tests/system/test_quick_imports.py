"""What starts is small, and asks the file system little: modules and requests are counted in fresh processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from hpcllm.system.quick_imports import ListedFolders, quick_imports

ROOT = Path(__file__).parents[2]
# our modules that a command loads: at most a tenth above what it took when this was written
MODULES = {"--help": 13, "plan --help": 21, "train --help": 19}
TRAINING = 216  # of `train` once it begins
BESIDE_TORCH = {"numba", "llvmlite", "h5py", "mpi4py", "xxhash", "zstandard", "tomli_w", "hpcllm"}
BESIDE_TORCH |= {"coverage", "yaml", "cython_runtime"}  # numba looks for the first two

# requests that Python's own import and os.path make: patched where both look them up
COUNTED = """
import json, os, posix, sys
counts = {"stat": 0, "modules": 0}
def counted(function):
    def call(*arguments, **more):
        counts["stat"] += 1
        return function(*arguments, **more)
    return call
for name in ("stat", "lstat"):
    patched = counted(getattr(posix, name))
    setattr(posix, name, patched)
    setattr(os, name, patched)
before = len(sys.modules)
%s
counts["modules"] = len(sys.modules) - before
print(json.dumps(counts))
"""
QUICKLY = "from hpcllm.system.quick_imports import quick_imports\nwith quick_imports():\n    %s"


def run(code: str, *, folder: Path = ROOT) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> list[str]:
    """Modules that some code loads."""
    words = f"import sys; before = set(sys.modules)\n{code}\nprint(chr(10), *(set(sys.modules) - before))"
    return run(words).splitlines()[-1].split()


@pytest.mark.parametrize("words", MODULES)
def test_a_command_that_only_speaks_loads_few_modules(words):
    code = f"from hpcllm.cli.main import main\ntry: main({words.split()})\nexcept SystemExit: pass"
    found = loaded(code)
    ours = sorted(name for name in found if name.split(".")[0] == "hpcllm")
    assert len(ours) <= 1.1 * MODULES[words], ours
    assert not {"torch", "numpy", "h5py", "mpi4py"} & set(found)


@pytest.mark.full(reason="starts of PyTorch under a tracer, a tenth of a minute", in_ci=True)
def test_training_loads_no_more_than_it_did():
    """Beside torch, which may grow as it likes: our own modules, and no package that was not there."""
    alone = {name.split(".")[0] for name in loaded("import torch")}
    found = loaded("import torch, hpcllm.training.loop, hpcllm.preflight.examination")
    ours = sorted(name for name in found if name.split(".")[0] == "hpcllm")
    assert len(ours) <= 1.1 * TRAINING, ours
    packages = {name.split(".")[0] for name in found} - alone - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith("_")} <= BESIDE_TORCH


@pytest.mark.full(reason="three starts of PyTorch under a tracer; half a minute on a slow machine")
def test_imports_ask_little_of_the_file_system():
    """Two a module, of its source and of what packages look for themselves; plain imports make twice as many."""
    what = "import hpcllm.training.loop"
    plain, quick = (json.loads(run(COUNTED % code)) for code in (what, QUICKLY % what))
    assert quick["stat"] <= 2.5 * quick["modules"], (plain, quick)
    assert plain["stat"] >= 2 * quick["stat"], (plain, quick)
    assert quick["modules"] <= plain["modules"] + 5


def test_every_module_is_found_where_python_finds_it():
    """Of all that training loads: the same file, loader and folders, or it is left to Python."""
    code = """
import sys
from importlib.machinery import PathFinder
import hpcllm.training.loop
from hpcllm.system.quick_imports import ListedFolders
finder, found = ListedFolders(), 0
for name, module in list(sys.modules.items()):
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if module is None or getattr(module, "__spec__", None) is None or (parent and path is None):
        continue
    mine, theirs = finder.find_spec(name, path), PathFinder.find_spec(name, path)
    if mine is None:
        continue
    found += 1
    for key in ("name", "origin", "cached", "submodule_search_locations", "has_location"):
        assert getattr(mine, key) == getattr(theirs, key), (name, key, mine, theirs)
    assert type(mine.loader) is type(theirs.loader), name
print(found)
"""
    assert int(run(code)) > 1000


def names(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"where = {file!r}")


def test_packages_modules_and_namespaces_are_told_apart(tmp_path, monkeypatch):
    names(tmp_path / "a", "pack/__init__.py", "pack/inner.py", "pack.py", "both/part_a.py", "plain.py")
    names(tmp_path / "b", "both/part_b.py", "plain.py", "late/x.py", "late.py")
    monkeypatch.syspath_prepend(tmp_path / "b")
    monkeypatch.syspath_prepend(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "is not there")
    finder = ListedFolders()
    for name in ("pack", "plain", "both", "late", "json", "is_nowhere"):
        mine, theirs = finder.find_spec(name), PathFinder.find_spec(name)
        assert mine is None or mine.origin == theirs.origin, name
    assert finder.find_spec("pack").origin.endswith("pack/__init__.py")
    assert finder.find_spec("both") is None  # a namespace: Python looks
    with quick_imports():
        from both import part_a, part_b

        assert (part_a.where, part_b.where) == ("both/part_a.py", "both/part_b.py")


def test_a_file_that_comes_late_is_found_and_one_that_changed_is_compiled_anew(tmp_path, monkeypatch):
    names(tmp_path, "here_before.py")
    monkeypatch.syspath_prepend(tmp_path)
    with quick_imports():
        import here_before

        assert here_before.where == "here_before.py"
        names(tmp_path, "came_late.py")
        importlib.invalidate_caches()
        import came_late

        assert came_late.where == "came_late.py"
        (tmp_path / "here_before.py").write_text("where = 'changed, and of another length'")
        assert importlib.reload(here_before).where.startswith("changed")


def test_nothing_stays_patched():
    before = (list(sys.meta_path), importlib.util.find_spec, __import__("inspect").getmodule)
    with pytest.raises(ZeroDivisionError), quick_imports():
        1 / 0  # noqa: B018
    assert before == (list(sys.meta_path), importlib.util.find_spec, __import__("inspect").getmodule)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["mesh.dp=3"], "the job has 1 rank; start it with 3"),
        (["mesh.dp=1", "data.global_batch=0"], "data.global_batch"),
        (["mesh.dp=1", "data.store=/is/not/there.h5"], "there is no token store"),
        (["mesh.dp=1", "pipeline.microbatches=3"], "pipeline.microbatches = 3 does not divide"),
    ],
)
def test_a_wrong_launch_is_refused_before_torch_is_loaded(tmp_path, settings, words):
    (tmp_path / "run.toml").write_text('[run]\nname = "a"\n[model]\npreset = "tiny"\n')
    line = ["train", "run.toml", *(word for each in ["data.store=x.h5", *settings] for word in ("--set", each))]
    code = f"""
import contextlib, io, sys
from hpcllm.cli.main import main
said = io.StringIO()
with contextlib.redirect_stderr(said):
    code = main({line})
print(code, "torch" in sys.modules, said.getvalue())
"""
    code, torch, said = run(code, folder=tmp_path).split(" ", 2)
    assert (code, torch) == ("2", "False")
    assert words in said
