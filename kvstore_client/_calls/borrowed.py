"""What a `borrow` lends to its caller, and how it is given back.

The server keeps a block that is lent until it is given back. So that is done only when nothing in this process refers
to it any more: a view, an array or a tensor that outlives the `with` block keeps what was lent with it. Views are not
released by force, because not all that read through them say so: `torch.frombuffer` keeps the view and its address, but
not the buffer.

No Python code runs in a finalizer: Ctrl-C would be lost there, and with it what the finalizer had to do. A reference
that dies only appends itself to a queue, and the client's next call looks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore._cext import LentBlocks
from kvstore_client._links.call import Call
from kvstore_client._links.targets import BorrowTarget


class Borrowed:
    """The blocks of one `borrow`, in the hands of the calling thread. If this is dropped without `end`, the next call
    ends it."""

    def __init__(self, target: BorrowTarget, lingering: Lingering) -> None:
        self._lending = Lending(target)
        self._lingering = lingering
        lingering.watch(self, self._lending)

    @property
    def calls(self) -> list[Call]:
        """The GETs of this borrow, to be added to."""
        return self._lending.calls

    @property
    def blocks(self) -> list[memoryview | None]:
        """By position: a read-only view, or None for a miss."""
        return self._lending.target.blocks

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """By position: whether the block is there."""
        return self._lending.target.present

    def end(self) -> None:
        """Forget the views, and give back what was lent: now, or when the last thing that refers to a block is gone."""
        self._lingering.end(self._lending)


class Lending:
    """What one `borrow` was lent. All methods may run twice, also in two threads."""

    def __init__(self, target: BorrowTarget) -> None:
        self.target = target
        self.calls: list[Call] = []
        self.holder: weakref.ref[Borrowed] | None = None  # until it has ended
        self.views: list[weakref.ref[LentBlocks]] = []  # after that: what keeps the blocks that were lent

    def in_use(self) -> bool:
        """Whether anything refers to one of the blocks, or still may."""
        holder = self.holder
        return (holder is not None and holder() is not None) or any(view() is not None for view in self.views)

    def forget_views(self) -> None:
        """Keep the blocks only for others that refer to them."""
        target = self.target
        target.blocks = []
        if target.exporters:
            self.views = [weakref.ref(exporter) for exporter in target.exporters]
            target.exporters = []
        self.holder = None

    def call_when_gone(self, gone: Callable[[weakref.ref[LentBlocks]], None]) -> None:
        """Have `gone` called when nothing refers to some of the blocks any more."""
        exporters = [view() for view in self.views]
        self.views = [weakref.ref(exporter, gone) for exporter in exporters if exporter is not None]

    def lending_calls(self) -> list[Call]:
        """The GETs that the servers have to be told of."""
        answers = {id(answer) for answer, _ in self.target.lent}
        return [call for call in self.calls if id(call.answer) in answers]

    def return_loans(self) -> None:
        """Let go of the server's memory."""
        for _, each in self.target.lent:
            each.give_back()
        self.target.lent = []


class Lingering:
    """All that a client borrowed and has not given back. Thread-safe."""

    def __init__(self) -> None:
        self._lendings: list[Lending] = []
        # What the next call has to look for: what finalizers found, by `append`, which is no Python code, and what is
        # being ended. Something in it: some of the lendings may be out of use.
        self._gone: deque[weakref.ref[Any] | Lending] = deque()

    def watch(self, borrowed: Borrowed, lending: Lending) -> None:
        """Keep the lending until nothing uses it: neither `borrowed` nor, after it, a view."""
        lending.holder = weakref.ref(borrowed, self._gone.append)
        self._lendings.append(lending)

    def end(self, lending: Lending) -> None:
        """Give back what is not in use, now; the rest when it is not in use any more."""
        self._gone.append(lending)  # first: if this is interrupted, the next call does it again
        lending.forget_views()
        if lending.in_use():
            lending.call_when_gone(self._gone.append)
        if not lending.in_use():
            for call in lending.lending_calls():
                call.link.release(call.id)
            lending.return_loans()
            with contextlib.suppress(ValueError):  # another thread was faster
                self._lendings.remove(lending)
        with contextlib.suppress(ValueError):
            self._gone.remove(lending)

    def sweep(self) -> None:
        """Give back what has come out of use since the last time."""
        seen = list(self._gone)
        if not seen:
            return
        for lending in list(self._lendings):
            if not lending.in_use():
                self.end(lending)
        for found in seen:  # only now: if this is interrupted, the next call does it again
            if isinstance(found, Lending) and found in self._lendings:  # another thread is ending it
                continue
            with contextlib.suppress(ValueError):  # another thread was faster
                self._gone.remove(found)
