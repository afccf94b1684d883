"""Laws of what is printed: nothing that others made steers a terminal."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.system.output import error_line, say
from hpcllm.system.text import harmless

STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@given(st.text())
def test_text_keeps_all_but_what_steers_and_says_that(text):
    shown = harmless(text)
    assert not STEERS.search(shown)
    assert harmless(shown) == shown
    if not re.search(STEERS.pattern + r"|[\u200e\u200f]", text):
        assert shown == text


@pytest.mark.parametrize("name", ["\x1b[2J", "\x1b]0;title\x07", "a\rb", "\x9b31m", "\u202etxt.exe", "\udcff"])
def test_names_do_not_steer_the_terminal(capsys, name):
    say([f"the file {name} is there"])
    print(error_line(f"no file {name}"), file=sys.stderr)
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert not STEERS.search(text)
        assert ascii(name[0])[1:-1] in text or name.isascii()
