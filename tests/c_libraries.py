"""Libraries of C that tests make up where a driver is wanted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def compiled(library: Path, text: str, flags: Sequence[str] = ()) -> Path:
    """Compile a shared library from C; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler here")
    source = library.with_name("source.c")
    source.write_text(text)
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    return library
