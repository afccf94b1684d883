"""Checks of what training reads: the length of its file, and now and then, in a thread, the checksum of a block.

    step         k     k+1   k+2   ...   each: 30 us of data.loader's time to see that nothing is due or to learn how
    every_s      |----------------|      the last one ended
    thread       XXH3 of 4 MiB that the batch has just brought into memory: 1 ms, without the interpreter's lock

Samples are drawn evenly from a store, so are the blocks: in an hour a rank verifies 360 of them, 1.5 GB. A bit that
flipped on the way from the disk or in the page cache is named with its place instead of being learned from.

To read what a file no longer has is a SIGBUS, which ends the process. So its length is asked for before a batch is
read: each time on a local disk (microseconds), less often where that is a message to a server, for LENGTH_SHARE of the
time at most.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from hpcllm.data.store import Split, TokenStore

EVERY_S = 10.0
LENGTH_SHARE = 1e-3


@dataclass
class StoreWatch:
    """Verification of one split by one rank."""

    store: TokenStore
    split: Split
    every_s: float = EVERY_S
    verified: int = 0  # blocks
    _due_s: float = field(init=False)
    _length_due_s: float = 0.0
    _pending: Future[None] | None = None
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        self._due_s = time.monotonic() + self.every_s

    def will_read(self) -> None:
        """See, if that is due, that the store is as long as it was. Raises CheckpointError. Not collective."""
        if (began_s := time.monotonic()) >= self._length_due_s:
            self.store.check_length()
            now_s = time.monotonic()
            self._length_due_s = now_s + (now_s - began_s) / LENGTH_SHARE

    def saw(self, token: int) -> None:
        """Take note that a batch was read from `token` on; begin to verify its block if one is due.

        Raises CheckpointError if the block before turned out to have changed. Not collective.
        """
        if self._pending is not None and self._pending.done():
            self._pending.result()
            self._pending, self.verified = None, self.verified + 1
        if self._pending is None and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self.every_s
            self._thread = self._thread or ThreadPoolExecutor(1, "token store")
            self._pending = self._thread.submit(self.store.verify_block_at, self.split, token)
