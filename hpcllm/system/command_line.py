"""One command line for `hpcllm` and `python -m hpcllm.perf`: parsing, mistakes, exit codes.

    words --Parser--> arguments --arguments.command--> exit code
             |  a word or option that is none     usage of the command that was called, and one line; 2
             |  a value that cannot be            one line; 2
    HpcllmError  one line; its exit code          closed pipe  0       full disk  1       Ctrl-C  130

A mistake of a command line that many ranks were started with is said once. Whatever is near to what was typed is
suggested: a command, an option, a run-file key that was given as an option.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hpcllm.config.names import closest, key_meant, nearest, shown
from hpcllm.config.rules import Range
from hpcllm.errors import ConfigError, HpcllmError, UsageError, UserError
from hpcllm.system.job import WAIT_LIMIT_S
from hpcllm.system.output import error_line

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of the file or device behind standard output
MOST_USAGE_LINES = 3
MOST_DIGITS = 60  # of a number on the command line
ALSO = {"np": "ranks", "n": "ranks", "nprocs": "ranks", "world_size": "ranks", "rank": "row", "draw": "plot"}
ALSO |= {"out": "output", "max_tokens": "tokens", "max_new_tokens": "tokens", "steps": "tokens"}
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # what web pages and word processors make of -- and -


class Parser(argparse.ArgumentParser):
    """Parser that raises its mistakes as UserError, with the nearest valid word."""

    words: Sequence[str] = ()  # that it parses

    def _error(self, message: str) -> UsageError:
        error = UsageError(message)
        error.usage = self._short_usage()
        return error

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message and (strange := self._strange_option()):
            message += f"; {strange} is unknown{self._meant(strange, self.words)}"
        raise self._error(message.removeprefix("argument "))

    def _strange_option(self) -> str:
        """Return the first word that looks like an option and is none of this command, "" if there is none."""
        known = self._option_string_actions
        return next((word for word in self.words if word.startswith("--") and word.partition("=")[0] not in known), "")

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; what is left over is a mistake of this command, not of the one above it. Raises UserError."""
        self.words = list(args or [])
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(self._unknown(extra, list(args or [])))
        return found, extra

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:  # the value alone is wrong: usage would not help
            raise ConfigError(str(error).removeprefix("argument ")) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        valid = list(map(str, action.choices))
        near = self._command_meant(action, str(value)) or closest(str(value), valid)
        hint = f"did you mean {near}? " if near else self._order_meant(action, str(value))
        name = "/".join(action.option_strings) or action.metavar or action.dest
        raise self._error(f"{name} {value!r} is unknown; {hint}valid: {', '.join(valid)}")

    def _command_meant(self, action: argparse.Action, word: str) -> str:
        """Return what was meant by a word in a command's place that is no misspelt command, "" if unknown."""
        if action.nargs != argparse.PARSER:
            return ""
        if word in ("help", "version") and f"--{word}" in self._option_string_actions:
            return f"--{word}"
        if word.endswith(".toml") and "train" in (action.choices or ()):
            return f"train {word}"
        return ""

    def _order_meant(self, action: argparse.Action, word: str) -> str:
        """Write what to do with options before a command, whose values are taken for it; "" if there are none."""
        before = self.words[: self.words.index(word)] if word in self.words else []
        is_late = action.nargs == argparse.PARSER and any(each.startswith("-") for each in before)
        return "the command comes first, then its options; " if is_late else ""

    def _short_usage(self) -> str:
        """Return the usage of this command; of one with many options, its arguments alone."""
        usage = self.format_usage().rstrip()
        if usage.count("\n") < MOST_USAGE_LINES:
            return usage
        needed = [_spelled(a) for a in self._get_optional_actions() if a.required]
        choices = [group._group_actions for group in self._mutually_exclusive_groups if group.required]
        needed += [f"({' | '.join(map(_spelled, actions))})" for actions in choices]
        words = [str(self._get_formatter()._format_args(a, a.dest)) for a in self._get_positional_actions()]
        return " ".join(["usage:", self.prog, *needed, "[OPTIONS]", *words]) + f"   (all: {self.prog} --help)"

    def _unknown(self, extra: Sequence[str], words: Sequence[str]) -> str:
        """Say which words are left over, and what was meant."""
        message = f"unrecognized arguments: {' '.join(extra)}"
        before = {word: (["", *words])[place] for place, word in enumerate(words)}
        if before.get(extra[0], "") in ("--json", "--json=-"):
            return f"{message}; a file for --json ends in .json, or is given as --json={extra[0]}"
        if extra[0][0] in DASHES or extra[0].lstrip("-")[:1] in tuple(DASHES):
            plain = "--" + extra[0].lstrip("-" + DASHES)
            is_own = plain.partition("=")[0] in self._option_string_actions
            meant = f"; did you mean {plain}?" if is_own else self._meant(plain, [plain, *extra[1:]])
            return f"{message}: its dash is no hyphen, as on some web pages{meant}"
        if extra[0].startswith("=") and before.get(extra[0], "") in words and "--set" in words:
            return f"{message}; write --set {before[extra[0]]}=VALUE without spaces"
        if extra[0].endswith(".toml") and not any(action.dest == "run" for action in self._actions):
            return f"{message}: this command reads no run file"
        option = next((word for word in extra if word.startswith("-")), "")
        return message + (self._meant(option, extra) if option else "")

    def _meant(self, option: str, extra: Sequence[str]) -> str:
        """Write '; did you mean --set run.steps=10?' for --steps 10."""
        word, _, value = option.lstrip("-").replace("-", "_").partition("=")
        own = [name for name in self._option_string_actions if name.startswith("--")]
        if f"--{ALSO.get(word, '')}" in own:
            return f"; did you mean --{ALSO[word]}?"
        if ALSO.get(word, word) == "ranks":
            return "; ranks are those that mpirun -n N or srun starts"
        near = closest(f"--{word.replace('_', '-')}", own, 0.75)
        if near or "--set" not in own:
            near = near or closest(f"--{word.replace('_', '-')}", own, 0.65)
            return f"; did you mean {near}?" if near else ""
        from hpcllm.config.schema import key_names  # only where a mistake is explained

        place = list(extra).index(option) + 1
        following = extra[place] if place < len(extra) and not extra[place].startswith("-") else ""
        key = key_meant(word, key_names())
        return f"; did you mean --set {key}={value or following or 'VALUE'}?" if key else ""


def _spelled(action: argparse.Action) -> str:
    """Write an option with its value, as in a usage line."""
    return f"{'/'.join(action.option_strings)} {action.metavar or action.dest.upper()}"


def run_command(parser: Callable[[Sequence[str]], Parser], argv: Sequence[str]) -> int:
    """Parse the command line, run its command, return the exit code. parser: makes the parser for these words."""
    words = _json_to_standard_output(argv)
    try:
        try:
            arguments = parser(words).parse_args(words)
        except UserError as error:
            return _mistake(error)
        from hpcllm.system import diagnostics  # not for --help, which has no time for it

        diagnostics.start()
        code: int = arguments.command(arguments)
        if sys.stdout:  # None where it was closed: `inspect >&-`
            sys.stdout.flush()
        return code
    except HpcllmError as error:
        print(error_line(str(error)), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `inspect | head`
        _forget_output()
        return 0
    except KeyboardInterrupt:
        print("hpcllm: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in NO_SPACE or error.filename:
            raise
        _forget_output()
        print(error_line(f"cannot write the output: {error.strerror}"), file=sys.stderr)
        return 1


def _json_to_standard_output(argv: Sequence[str]) -> list[str]:
    """Give --json its usual FILE, standard output, unless a name that ends in .json follows.

    Otherwise argparse would take `--json run.toml` as the order to write into the run file.
    """
    following = [*argv, ""][1:]
    return [
        "--json=-" if word == "--json" and not (after == "-" or after.endswith(".json")) else word
        for word, after in zip(argv, following, strict=True)
    ]


def _mistake(error: UserError) -> int:
    """Say a mistake of the command line, once for all ranks that were started with it; returns its exit code."""
    from hpcllm.system.job import launched_ranks, run_job

    usage = error.usage if isinstance(error, UsageError) else ""
    if launched_ranks() == 1:
        if usage:
            print(usage, file=sys.stderr)
        raise error

    def say_once(world: Any) -> int:
        if usage and world.rank == 0:
            print(usage, file=sys.stderr, flush=True)
        raise error

    return run_job(say_once)


def _forget_output() -> None:
    """Send the rest of the output nowhere; else the interpreter would fail to write it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def one_of(option: str, valid: Sequence[str]) -> Callable[[str], str]:
    """Make a `type=` function for one of the names, in any case. Raises ConfigError."""

    def choice(text: str) -> str:
        if text.lower() in valid:
            return text.lower()
        raise ConfigError(f"{option} {text!r} is unknown; {nearest(text, valid)}")

    return choice


def real(valid: Range) -> Callable[[str], float]:
    """Make a `type=` function for numbers of a range."""

    def number(text: str) -> float:
        try:
            value = float(text) if len(text) <= MOST_DIGITS else math.nan
        except ValueError:
            value = math.nan
        if value not in valid:
            raise argparse.ArgumentTypeError(f"{shown(text)} is out of range; valid: a number, {valid}")
        return value

    return number


def add_stall_limit(parser: argparse._ActionsContainer, default: float = WAIT_LIMIT_S) -> None:
    """Add --stall-s, for commands of several ranks whose limit is not in a run file."""
    words = f"end if ranks wait so long for another; 6 times that while one works (default: {default:g})"
    parser.add_argument("--stall-s", type=real(Range(0.1, 1e6)), default=default, metavar="S", help=words)
