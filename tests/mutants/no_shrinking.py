"""A plugin of pytest, for run.py: hypothesis stops at the first example that fails and looks for no smaller one."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import Phase


@pytest.hookimpl(trylast=True)  # after the profile of conftest.py
def pytest_configure() -> None:
    phases = [Phase.explicit, Phase.generate]
    before = hypothesis.settings.get_profile("shared machine")
    hypothesis.settings.register_profile("no shrinking", before, phases=phases, database=None)
    hypothesis.settings.load_profile("no shrinking")
