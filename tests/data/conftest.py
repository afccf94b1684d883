"""A corpus with everything that goes wrong in practice, as a fixture: it travels between ranks, so its class stands in
a module that has a name of its own."""

from __future__ import annotations

import pytest
from corpora import make_corpus


@pytest.fixture
def corpus_maker():
    return make_corpus
