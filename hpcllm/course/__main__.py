"""`python -m hpcllm.course` and `hpcllm course`: list, start, check, grade, demo.

    start LAB [FOLDER]     the file to fill in and the sheet      check [LAB]     laws, races, predictions: points
    demo LAB               the races with our own functions       grade FOLDER... many files, one table
    links                  lab 3's sum on slow links

Exit codes: 0 all laws hold (grade: all were graded), 1 one does not (grade: one was not), 2 user error.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpcllm
from hpcllm.config.input_files import fault_of, read_bytes
from hpcllm.config.names import shown
from hpcllm.course.catalogue import LABS, Entry, find_lab, load_lab
from hpcllm.course.links import RATES, check_rates, lines, measure
from hpcllm.errors import ConfigError, DataError, HpcllmError
from hpcllm.plotting import picture_path
from hpcllm.system.command_line import Parser, run_command
from hpcllm.system.hardware.node import find_hardware
from hpcllm.system.job import launched_ranks
from hpcllm.system.output import add_output, check_writable, say, show, write_whole
from hpcllm.system.raw_files import writing
from hpcllm.system.text import printable, printable_path, table

if TYPE_CHECKING:
    from hpcllm.course.score import Grade

LARGEST_FILE_BYTES = 1 << 20
SHEET = "sheet.md"
COLUMNS = ("folder", "lab", "laws", "races", "predictions", "points", "hint")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    return run_command(_parser, sys.argv[1:] if argv is None else argv)


def _parser(_: Sequence[str]) -> Parser:
    parser = Parser(prog="python -m hpcllm.course")
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands."""
    parser.description = "A course of labs that grade themselves: replace one function of the trainer."
    parser.epilog = "Begin with: hpcllm course list, hpcllm course start allreduce"
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="course_command")
    for name, (about, add_options, command) in COMMANDS.items():
        own = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        add_options(own)
        own.set_defaults(command=command)


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lab", metavar="LAB", help="name or number")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="of the files (default: the lab's name)")


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lab", nargs="?", metavar="LAB", help="name or number (default: that of the file in the folder)")
    add("--folder", type=Path, default=Path(), metavar="FOLDER", help="of the file (default: this one)")
    add("--plot", type=picture_path, metavar="FILE", help="draw the races, .svg or .png")
    add("--seed", default="", metavar="TEXT", help="draw the cases again of a check whose JSON says this seed")
    add_output(parser, "the grade as JSON")


def _add_grade(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of one student each")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table for a gradebook")
    add_output(parser, "all grades as JSON")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lab", metavar="LAB", help="name or number")
    parser.add_argument("--plot", type=picture_path, metavar="FILE", help="draw the races, .svg or .png")
    add_output(parser, "the rows as JSON")


def _add_links(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=Path(), metavar="FOLDER", help="of codec.py (default: this one)")
    add("--rates", default=",".join(RATES), metavar="R,...", help="of the links (default: %(default)s)")
    add_output(parser, "the seconds as JSON")


def _list(arguments: argparse.Namespace) -> int:
    facts = [entry._asdict() for entry in LABS.values()]
    rows = [[str(entry.number), entry.name, entry.title] for entry in LABS.values()]
    show(arguments, facts, table(["lab", "name", "about"], rows, indent="", gap="  ", left=3))
    return 0


def _start(arguments: argparse.Namespace) -> int:
    entry = find_lab(arguments.lab)
    folder = arguments.folder or Path(entry.name)
    if fault := fault_of(folder):
        raise ConfigError(f"cannot look at {shown(str(folder))}: {fault}")
    names = (entry.file_name, SHEET)
    if there := [name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{str(folder / there[0])!r} is there already, and might hold work; valid: another folder")
    with writing(repr(str(folder))):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            write_whole(folder / name, (entry.folder / name).read_text(encoding="utf-8"))
    say([f"written: {folder / entry.file_name} to fill in, {folder / SHEET} to read",
         f"then: hpcllm course check --folder {folder}"])  # fmt: skip
    return 0


def _check(arguments: argparse.Namespace) -> int:
    _check_alone("check")
    entry, path = submission(arguments.folder, arguments.lab)
    check_writable(arguments.plot)
    found = _graded(entry, path, arguments.seed)
    _draw(arguments, found, entry)
    from hpcllm.course.score import grade_lines

    show(arguments, found.as_dict(), grade_lines(found))
    return 0 if found.all_laws_hold else 1


def _grade(arguments: argparse.Namespace) -> int:
    _check_alone("grade")
    check_writable(arguments.csv)
    work = [(folder, *found) for folder in arguments.folders for found in _handed_in(folder)]
    if not any(isinstance(found, Path) for _, _, found in work):
        raise ConfigError(f"nothing to grade: {work[0][2]}")
    rows, facts = [], []
    for number, (folder, lab, found) in enumerate(work, start=1):
        _aside(f"hpcllm: {number} of {len(work)}: {printable_path(str(folder))}, {lab}\n")
        row, fact = _graded_row(lab, found)
        rows.append([str(folder), lab, *row])
        facts.append({"folder": printable_path(str(folder)), "lab": lab, **fact})
        if arguments.csv:  # each time: who ends it in the middle of a class has what was graded
            with writing(repr(str(arguments.csv))):
                write_whole(arguments.csv, _csv(rows))
    show(arguments, facts, table(COLUMNS, [[printable_path(row[0]), *row[1:]] for row in rows], indent="", left=2))
    return 1 if any("error" in fact for fact in facts) else 0


def _handed_in(folder: Path) -> list[tuple[str, Path | str]]:
    """List lab and file of what is in a folder; where there is none, why."""
    try:
        return [(entry.name, path) for entry, path in _submissions(folder)]
    except ConfigError as error:
        return [("none", str(error))]


def _graded_row(lab: str, found: Path | str) -> tuple[list[str], dict[str, Any]]:
    """Grade a file: cells and facts. Where that cannot be, why is in the place of the hint."""
    why = str(found)
    if isinstance(found, Path):
        try:
            graded = _graded(find_lab(lab), found, "")
            return _points(graded), graded.as_dict()
        except (HpcllmError, OSError) as error:
            why = str(error)
    return ["0", "0", "0", "0", printable(why)], {"earned": 0, "error": why}


def _points(found: Grade) -> list[str]:
    hinted = found.first_hint
    numbers = [found.of_stage(stage) for stage in ("laws", "races", "predictions")]
    return [*(f"{number:g}" for number in (*numbers, found.earned)), hinted.hint_key if hinted else ""]


def _csv(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as CSV, in which no cell begins like a formula, as a folder's name might."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows([f"'{cell}" if cell[:1] in "=+-@\t\r" and cell else cell for cell in row] for row in rows)
    return file.getvalue()


def _demo(arguments: argparse.Namespace) -> int:
    _check_alone("demo")
    entry = find_lab(arguments.lab)
    check_writable(arguments.plot)
    found = _graded(entry, None, "")
    _draw(arguments, found, entry)
    races = {race.name: race for race in load_lab(entry).races}
    lines = [f"lab {entry.name}: {entry.title}, by our own functions", ""]
    for part in found.parts:
        if part.rows:
            race = races[part.name]
            if race.both_ways:
                cells = [[row.label, *map(_seconds, (row.student, row.ours, row.native))] for row in part.rows]
                columns = ("predicted", race.against, race.native_label)
            else:
                cells = [[row.label, *map(_seconds, (row.ours, row.native, row.bound))] for row in part.rows]
                columns = ("ours", "library", "bound")
            head = ["", *(f"{whose} {race.unit}" for whose in columns)]
            lines += [part.name, *table(head, cells, gap="  "), ""]
    show(arguments, found.as_dict(), lines[:-1])
    return 0


def _links(arguments: argparse.Namespace) -> int:
    _check_alone("links")
    rates = check_rates(arguments.rates)
    _, path = submission(arguments.folder, "codec")
    kind, why, rows = measure(path.resolve(), rates)
    facts = {"links": kind, "because": why, "rows": [asdict(row) for row in rows]}
    show(arguments, facts, lines(kind, why, rows))
    return 0


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _draw(arguments: argparse.Namespace, found: Grade, entry: Entry) -> None:
    if arguments.plot and any(part.rows for part in found.parts):
        from hpcllm.course.picture import draw

        with writing(repr(str(arguments.plot))):
            draw(found, load_lab(entry), arguments.plot)
    elif arguments.plot:
        _aside(f"hpcllm: no picture {arguments.plot}: races come after the laws\n")


def _graded(entry: Entry, path: Path | None, seed: str) -> Grade:
    """Run a check. path: None for our own functions. Raises UserError, HpcllmError."""
    from hpcllm.course.runner import run_check
    from hpcllm.course.score import grade

    code = b"" if path is None else _code(path)
    drawn = seed or secrets.token_hex(8)
    outcome = run_check(entry, path and path.resolve(), drawn, _tell)
    _aside("\n")
    facts = {"seed": drawn, "code_sha256": hashlib.sha256(code).hexdigest(), "machine": fingerprint(outcome.library)}
    return grade(load_lab(entry), outcome, facts)


def _tell(word: str) -> None:
    """Show that a check is going on: a mark for each part."""
    _aside({"held": "law ", "row": "race ", "measured": "number "}.get(word, ""))


def _aside(text: str) -> None:
    """Write what is no result to standard error, unless that is closed."""
    if sys.stderr:
        print(text, end="", file=sys.stderr, flush=True)


def fingerprint(library: str) -> dict[str, Any]:
    """Describe this machine, as far as it bears on times, with a hash of it all."""
    hardware = find_hardware()
    facts: dict[str, Any] = {
        "processor": hardware.processor,
        "hardware_threads": len(hardware.topology.cores),
        "memory_bytes": hardware.memory.rounded().usable_bytes,
        "library": library,
        "python": sys.version.split()[0],
        "hpcllm": hpcllm.__version__,
    }
    return facts | {"sha256": hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()}


def _code(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST_FILE_BYTES)
    except ValueError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error


def submission(folder: Path, lab: str | None) -> tuple[Entry, Path]:
    """Find the file to check: of this lab, or the only one in the folder. Raises ConfigError."""
    if lab is None:
        found = _submissions(folder)
        if len(found) > 1:
            raise ConfigError(f"{str(folder)!r} has files of labs {', '.join(e.name for e, _ in found)}; name one")
        return found[0]
    entry = find_lab(lab)
    places = [folder / entry.file_name, folder / entry.name / entry.file_name]
    if found_here := next((path for path in places if path.is_file()), None):
        return entry, found_here
    raise ConfigError(f"there is no {entry.file_name} in {str(folder)!r}; begin with: hpcllm course start {entry.name}")


def _submissions(folder: Path) -> list[tuple[Entry, Path]]:
    """List the files of labs in a folder. Raises ConfigError if there is none."""
    if fault := fault_of(folder):
        raise ConfigError(f"cannot look at {shown(str(folder))}: {fault}")
    found = [(entry, folder / entry.file_name) for entry in LABS.values() if (folder / entry.file_name).is_file()]
    if not found:
        valid = ", ".join(entry.file_name for entry in LABS.values())
        raise ConfigError(f"there is no file of a lab in {str(folder)!r}; valid: a folder with one of {valid}")
    return found


def _check_alone(command: str) -> None:
    if launched_ranks() > 1:
        raise ConfigError(f"course {command} starts its ranks by itself; start it without mpirun or srun")


COMMANDS = {  # name: (help, function that adds its options, function that runs it)
    "list": ("list the labs", add_output, _list),
    "start": ("write the file to fill in, and the sheet", _add_start, _start),
    "check": ("judge the file: laws on 1 to 4 ranks, then speed, then predictions", _add_check, _check),
    "grade": ("check the files of many folders; one table", _add_grade, _grade),
    "demo": ("run the races of a lab with our own functions", _add_demo, _demo),
    "links": ("measure lab 3's sum on slow links: namespaces, or nodes", _add_links, _links),
}

if __name__ == "__main__":
    sys.exit(main())
