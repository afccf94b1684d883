"""Laws of the house: how rooms import one another, what loads no MPI, and texts that are true.

    cli -> course -> preflight -> perf -> report -> training -> ... -> config -> codecs -> errors

Each room imports only from those below it, inside functions too, and nothing imports in a circle. What is used on a
login node loads neither torch nor mpi4py. Docstrings stand alone, and the files that they name exist. What each room is
for: docs/explanation/architecture.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcllm.config.schema import from_tables, to_tables

ROOT = Path(__file__).parents[1]
ROOMS = (  # top to bottom
    *("__main__", "cli", "course", "preflight", "perf", "report", "finetuning", "training", "evaluation", "inference"),
    *("plan", "data", "checkpoint", "optim", "pipeline", "model", "collectives", "system", "mpi", "config", "codecs"),
    *("plotting", "errors", "__init__"),
)
FILES = sorted((ROOT / "hpcllm").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """'collectives' of 'hpcllm.collectives.ring'; '__init__' of 'hpcllm' itself."""
    return [*module.split("."), "__init__"][1]


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Modules of ours that a file imports; everywhere: inside functions too, but never for types alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.FunctionDef | ast.Lambda) and not everywhere:
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hpcllm":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "hpcllm")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_every_room_has_its_place_in_the_order():
    assert {room_of(module) for module in MODULES} <= set(ROOMS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down(module):
    mine = ROOMS.index(room_of(module))
    upward = [other for other in sorted(imports(MODULES[module])) if ROOMS.index(room_of(other)) < mine]
    assert not upward, f"{module} imports {', '.join(upward)}, which stands above it"


def test_no_imports_in_a_circle():
    below = {module: {o for o in imports(path, everywhere=False) if o in MODULES} for module, path in MODULES.items()}
    while leaves := {module for module, others in below.items() if not others & below.keys() - {module}}:
        for leaf in leaves:
            del below[leaf]
    assert not below, f"these import one another in a circle: {', '.join(sorted(below))}"


@pytest.mark.parametrize(
    "module",
    [
        *("schedule", "plan", "memory", "layout", "dry_run", "options", "main"),  # commands that run on a login node
        *("preflight.checks", "preflight.page", "system.affinity", "system.slurm"),  # checks of a launch
        *("plan.resolve", "pipeline.schedules", "pipeline.checker", "pipeline.timing", "model.shapes"),
        *("config.schema", "mpi.mesh_axes", "mpi.partition", "checkpoint.slabs", "collectives.cost"),
    ],
)
def test_what_plans_and_checks_loads_neither_torch_nor_mpi4py(module):
    name = module if "." in module else f"cli.{module}"
    code = f"import sys, hpcllm.{name}; sys.exit(' '.join({{'torch', 'mpi4py'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_chain_of_imports_is_long():
    """A reader who follows one name to its end opens at most so many files."""
    below = {module: imports(path, everywhere=False) & MODULES.keys() for module, path in MODULES.items()}
    lengths: dict[str, int] = {}

    def length(module: str) -> int:
        if module not in lengths:
            lengths[module] = 1 + max((length(other) for other in below[module] - {module}), default=0)
        return lengths[module]

    longest = max(MODULES, key=length)
    assert length(longest) <= 16, f"from {longest} down, {length(longest)} modules import one another"


RIDDLES = re.compile(r"(Of|What|Whether|The same|That|As|In which|Which|How|With|Is|For|So|Where|Who)\b")


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the module and of all its classes and functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    """In an editor's hover each stands alone: nobody sees what "Of" or "The same" would go on from."""
    assert [f"{name}: {text.partition(chr(10))[0]}" for name, text in docstrings(path) if RIDDLES.match(text)] == []


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
KNOWN = TRACKED if len(TRACKED) > 1 else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*")]
DOCUMENTS = [path for path in KNOWN if path.endswith(".md") and not path.startswith(("perf/", "CHANGELOG"))]
NAMED = re.compile(r"(?<![\w/.*{}<>-])((?:[a-z_0-9.-]+/)*[a-z_0-9]+\.(?:py|cu|cuh|md))\b")


@pytest.mark.parametrize("file", [str(path.relative_to(ROOT)) for path in FILES] + DOCUMENTS)
def test_files_that_texts_name_exist(file):
    """Named from the root, from the package, from the text's own folder, or by the end of the path.

    Links between pages are held by tests/docs.
    """
    path = ROOT / file
    text = (
        re.sub(r"\]\([^)]*\)", "]", path.read_text())
        if path.suffix == ".md"
        else "\n".join(text for _, text in docstrings(path))
    )
    missing = [name for name in NAMED.findall(text) if not any(f"/{known}".endswith(f"/{name}") for known in KNOWN)]
    assert sorted(set(missing) - {"train.py", "my.py"}) == []


TABLES = set(to_tables(from_tables({}))) | {"layout", "options"}  # keys of a run file, of --layout, of a command line
OURS_OR_A_FILE = re.compile(r"(?<![\w./@\[<-])([a-z_]+)\.([a-zA-Z_]\w+)\b")
ENDINGS = {"py", "md", "json", "jsonl", "toml", "h5", "txt", "cu", "cuh", "html"}


def names_in(path: Path) -> set[str]:
    """Every name that a file defines or uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        found = [getattr(node, field, None) for field in ("name", "id", "attr", "arg", "asname")]
        names.update(name.split(".")[0] for name in found if isinstance(name, str))
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_modules_that_docstrings_mention_exist(path):
    """`on_root` in "collective_errors.on_root" is a name of that module."""
    missing = []
    for module, name in OURS_OR_A_FILE.findall("\n".join(text for _, text in docstrings(path))):
        homes = [home for home in MODULES if home.endswith(f".{module}")]
        if not homes or module in TABLES | sys.stdlib_module_names or name in ENDINGS:
            continue
        if not any(f"{home}.{name}" in MODULES or name in names_in(MODULES[home]) for home in homes):
            missing.append(f"{module}.{name}")
    assert missing == []


def test_files_of_tests_have_names_of_their_own():
    """Where folders of tests are no packages, pytest takes a module by its file's name alone."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    modules = [path.name for path in paths if not (path.parent / "__init__.py").exists()]
    assert sorted(name for name in set(modules) if modules.count(name) > 1) == []


SCRIPTS = [name for name in KNOWN if name.endswith((".sh", ".sbatch", ".pbs", ".flux")) or name == ".ci/run"]
LEAVES_EARLY = re.compile(r"\| *(head\b|grep +-\w*[qm]|sed +(-\w+ +)*['\"]?\d+q)")


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_pipe_ends_in_a_reader_that_leaves_early(script):
    """Under pipefail the writer's SIGPIPE ends the script, now and then: a race between the writer and the reader."""
    assert [line for line in (ROOT / script).read_text().splitlines() if LEAVES_EARLY.search(line)] == []
