"""Completion in real shells: they read the script, words and a tab are typed, and what stands there then is read."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcllm.cli.main import main
from hpcllm.config import machines

LIMIT_S = 20.0
SHELLS = {  # shell -> (its command, what makes it read the script)
    "bash": (("bash", "--norc", "--noprofile", "-i"), ". ./_hpcllm"),
    "zsh": (("zsh", "-f", "-i"), "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"),
    "tcsh": (("tcsh", "-f"), "source _hpcllm"),
}
TYPED = {  # what is typed before a tab -> what stands there then
    "hpcllm gene": "hpcllm generate ",
    "hpcllm checkpoint ver": "hpcllm checkpoint verify ",
    "hpcllm train --rest": "hpcllm train --restart ",
    "hpcllm plan --machine mareno": "hpcllm plan --machine marenostrum5-acc ",
    "hpcllm train my_r": "hpcllm train my_run.toml ",
}
OF_TCSH = ("hpcllm gene", "hpcllm train --rest")  # shtab gives it no more: commands and options


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, shell: str, folder: str) -> None:
        self.here, self.there = pty.openpty()
        name = os.ttyname(self.there)
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "TERM": "xterm", "PS1": "$ ", "NAME": name}
        # the first terminal that a session opens is its own, without which tcsh does not edit lines
        command = ["sh", "-c", 'exec "$0" "$@" <>"$NAME" >&0 2>&0', *SHELLS[shell][0]]
        self.shell = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
        self.type(f"{SHELLS[shell][1]}\necho re''ady\n")
        self.until("ready")

    def type(self, text: str) -> None:
        os.write(self.here, text.encode())

    def until(self, wanted: str) -> str:
        """Read until it stands there; what was read if it does not come."""
        read, end_s = "", time.monotonic() + LIMIT_S
        while wanted not in read and time.monotonic() < end_s:
            if select.select([self.here], [], [], 0.2)[0]:
                read += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x07]|.\x08", "", os.read(self.here, 65536).decode())
        assert wanted in read, read
        return read


@contextlib.contextmanager
def terminal(shell: str, folder: str) -> Iterator[Terminal]:
    made = Terminal(shell, folder)
    try:
        yield made
    finally:
        made.shell.kill()
        made.shell.wait()
        os.close(made.here)
        os.close(made.there)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_completes_commands_options_names_and_files(shell, tmp_path, capsys):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "_hpcllm").write_text(capsys.readouterr().out)
    (tmp_path / "my_run.toml").touch()
    with terminal(shell, str(tmp_path)) as shown:
        for words, whole in TYPED.items():
            if shell == "tcsh" and words not in OF_TCSH:
                continue
            shown.type(f"{words}\t")
            shown.until(whole)
            shown.type("\x15")  # takes the line back


def test_every_machine_is_offered(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (offered,) = re.findall(r"^_shtab_hpcllm_plan___machine_choices=\((.*)\)$", script, re.MULTILINE)
    assert re.findall(r"[^' ]+", offered) == machines.names()


def test_without_the_package_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hpcllm: error: completion is made by the package shtab: pip install shtab\n"
