"""What a `borrow` lends to its caller, and how it is given back.

The server keeps a block that is lent until it is given back. So that is done only when nothing in this process refers
to it any more: a view, an array or a tensor that outlives the `with` block keeps what was lent with it. Views are not
released by force, because not all that read through them say so: `torch.frombuffer` keeps the view and its address, but
not the buffer.
"""

from __future__ import annotations

import contextlib
import weakref

from kvstore import wire
from kvstore._cext import LentBlock
from kvstore_client._links.call import Call
from kvstore_client._links.targets import BorrowTarget


class Borrowed:
    """The blocks of one `borrow`. Used by the calling thread; what finalizers call is thread-safe."""

    def __init__(self, target: BorrowTarget, lingering: Lingering) -> None:
        self.calls: list[Call] = []
        self._target = target
        self._lingering = lingering
        self._ended = False
        self._exporters: list[weakref.ref[LentBlock]] = []

    @property
    def blocks(self) -> list[memoryview | None]:
        """By position: a read-only view, or None for a miss."""
        return self._target.blocks

    @property
    def in_use(self) -> bool:
        """Whether anything refers to one of the blocks."""
        return any(exporter() is not None for exporter in self._exporters)

    def end(self) -> None:
        """Forget the views, and give back what was lent: now, or when the last thing that refers to a block is gone."""
        target = self._target
        self._exporters = [weakref.ref(exporter) for exporter in target.exporters]
        target.exporters, target.blocks = [], []
        if self.in_use:
            self._lingering.add(self)
            for reference in self._exporters:
                exporter = reference()
                if exporter is not None:
                    weakref.finalize(exporter, self._lingering.sweep)
                del exporter
        else:
            for call in self._lending_calls():
                call.link.post(wire.encode(wire.Release(call.id, 0)))
            self._loans_returned()
        self._ended = True

    def __del__(self) -> None:
        if not self._ended:  # `end` was not called, or was interrupted
            self.give_back_later()

    def give_back_later(self) -> None:
        """Have the next call tell the servers: a finalizer, which runs at any moment, sends nothing."""
        for call in self._lending_calls():
            call.link.unreleased.append(call.id)
        self._loans_returned()

    def _lending_calls(self) -> list[Call]:
        answers = {id(answer) for answer, _ in self._target.lent}
        return [call for call in self.calls if id(call.answer) in answers]

    def _loans_returned(self) -> None:
        for _, each in self._target.lent:
            each.give_back()
        self._target.lent = []


class Lingering:
    """What was borrowed, and is still in use after its `borrow` has ended. Thread-safe.

    A finalizer gives it back, or, because an exception there (Ctrl-C) is lost, the client's next call does.
    """

    def __init__(self) -> None:
        self._borrowed: list[Borrowed] = []

    def add(self, borrowed: Borrowed) -> None:
        """Keep it until nothing refers to its blocks."""
        self._borrowed.append(borrowed)

    def sweep(self) -> None:
        """Give back what is not in use any more. May run twice for the same: giving back does nothing then."""
        for borrowed in list(self._borrowed):
            if not borrowed.in_use:
                borrowed.give_back_later()
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._borrowed.remove(borrowed)
