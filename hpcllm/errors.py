"""Errors as a tree of types; the exit code of a command follows from the type.

    HpcllmError            1   the run failed
    |-- StallError         1   a message did not come within its limit
    |-- NonFiniteError     1   the loss is no longer a number
    |-- CollectiveError    1   one or more other ranks failed
    |-- CheckpointError    1   a file that should have been whole is not
    |-- CodecError         1   bytes that no encoder wrote
    |-- ReplicaError       1   replicas that should be equal differ
    |-- RewardError        1   the function that rewards texts failed
    `-- UserError          2   a request that cannot be met; raised before any work starts
        |-- ConfigError        a key or a value of the run file
        |-- MeshError          ranks and layout do not fit together
        |-- ScheduleError      a pipeline schedule that cannot be made, read or run
        |-- DataError          an input, a token store, a tokenizer
        `-- HuggingFaceError   weights from or for Hugging Face's formats

Every message names the thing, the numbers and what would be valid, because it is read in the log of hundreds of
ranks, a queue wait later.
"""

from __future__ import annotations


class HpcllmError(Exception):
    """Root of the errors that this package raises on purpose."""

    exit_code = 1
    everywhere = False  # True on an error that every rank is known to raise: printed once, and no rank is left waiting


class StallError(HpcllmError):
    """A wait passed its limit. The message names the rank, the peer and what was awaited."""


class NonFiniteError(HpcllmError):
    """The loss or the gradient norm is NaN or infinite."""


class CollectiveError(HpcllmError):
    """Other ranks failed; the message lists which and why."""


class CheckpointError(HpcllmError):
    """A checkpoint is damaged or does not fit the run."""


class CodecError(HpcllmError):
    """Bytes that cannot be decoded: cut off, damaged, or of another codec."""


class ReplicaError(HpcllmError):
    """Ranks that hold the same parameters no longer have the same bits."""


class RewardError(HpcllmError):
    """The function that rewards texts crashed, took too long, or returned what is no finite number."""


class UserError(HpcllmError):
    """Request of the user that cannot be met."""

    exit_code = 2


class UsageError(UserError):
    """A command line that cannot be parsed."""

    usage = ""  # of the command that was called


class ConfigError(UserError):
    """A key or value of the run file is wrong."""


class MeshError(UserError):
    """The layout does not fit the ranks, the model or the batch."""


class ScheduleError(UserError):
    """A pipeline schedule does not exist in this shape, cannot be read, or would not run to its end."""


class DataError(UserError):
    """An input, a token store or a tokenizer cannot be used."""


class HuggingFaceError(UserError):
    """A folder of weights that is not what it says, or a model that another format cannot say."""
