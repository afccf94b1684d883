"""The token store of a run: there, sound, long enough, and of a vocabulary that the model has room for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hpcllm.config import Config
from hpcllm.data.sampler import sample_count
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mpi4py import MPI


def open_store(config: Config, comm: MPI.Intracomm | None) -> tuple[Config, TokenStore]:
    """The token store, and the config with its vocabulary filled in. Collective over comm; None: one process.

    Raises UserError.
    """
    if not config.data.store:
        raise ConfigError("data.store is missing: the path of a token store, written by `python -m hpcllm prepare`")
    store = TokenStore.open(config.data.store, comm)
    tokens = len(store.tokens("train"))
    if sample_count(tokens, config.data.sequence_length) < 1:
        raise DataError(
            f"{config.data.store!r} has {tokens} training tokens, too few for one sample of "
            f"data.sequence_length = {config.data.sequence_length} and its last target; prepare more text"
        )
    vocabulary = config.model.vocabulary or store.vocabulary
    if vocabulary < store.vocabulary:
        raise ConfigError(
            f"model.vocabulary = {vocabulary} is smaller than that of {config.data.store!r}, {store.vocabulary}; "
            f"valid: {store.vocabulary} or more, or 0 to take the store's"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=vocabulary)), store
