"""The blocks that a `borrow` lends to its caller, and how they are given back.

The server keeps a lent block until the client gives it back. The client does so only when nothing in this process
refers to the block any more. So a view, an array or a tensor that outlives the `with` block keeps the loan open. Views
are not released by force, because some users of a view do not hold its buffer. For example, `torch.frombuffer` keeps
the view and its address, but not the buffer.

Finalizers run no Python code, because a Ctrl-C during such code would be lost, together with the finalizer's work. A
reference that dies only appends itself to a queue, which the client's next call checks.
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
    """The blocks of one `borrow`, for the calling thread. If nothing refers to this object any more and `end` was not
    called, the client's next call ends the borrow."""

    def __init__(self, target: BorrowTarget, lingering: OpenLoans) -> None:
        self._lending = BorrowedLoan(target)
        self._lingering = lingering
        lingering.watch(self, self._lending)

    @property
    def calls(self) -> list[Call]:
        """The GETs of this borrow. The `Reader` adds to this list."""
        return self._lending.calls

    @property
    def blocks(self) -> list[memoryview | None]:
        """For each position, a read-only view of the block, or None on a miss."""
        return self._lending.target.blocks

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """For each position, whether the block was found."""
        return self._lending.target.present

    def end(self) -> None:
        """Forget the views. Give the blocks back now, or later, when nothing refers to any of them any more."""
        self._lingering.end(self._lending)


class BorrowedLoan:
    """The loans of one `borrow`. Every method may be called repeatedly, also by two threads at once."""

    def __init__(self, target: BorrowTarget) -> None:
        self.target = target
        self.calls: list[Call] = []
        self.holder: weakref.ref[Borrowed] | None = None  # None after the borrow has ended
        self.views: list[weakref.ref[LentBlocks]] = []  # the exporters of lent blocks, after the borrow's end

    def in_use(self) -> bool:
        """Return whether anything refers to one of the blocks, or may still get a reference to it."""
        holder = self.holder
        return (holder is not None and holder() is not None) or any(view() is not None for view in self.views)

    def forget_views(self) -> None:
        """Drop this object's own references, so that only the references of other objects keep the blocks."""
        target = self.target
        target.blocks = []
        if target.exporters:
            self.views = [weakref.ref(exporter) for exporter in target.exporters]
            target.exporters = []
        self.holder = None

    def call_when_gone(self, gone: Callable[[weakref.ref[LentBlocks]], None]) -> None:
        """Have `gone` called for each group of the blocks as soon as nothing refers to the group any more."""
        exporters = [view() for view in self.views]
        self.views = [weakref.ref(exporter, gone) for exporter in exporters if exporter is not None]

    def lending_calls(self) -> list[Call]:
        """Return the GETs whose loans must be given back to the servers."""
        answers = {id(answer) for answer, _ in self.target.lent}
        return [call for call in self.calls if id(call.answer) in answers]

    def return_loans(self) -> None:
        """End the loans of the servers' memory."""
        for _, each in self.target.lent:
            each.give_back()
        self.target.lent = []


class OpenLoans:
    """All loans that a client has not given back. Thread-safe."""

    def __init__(self) -> None:
        self._lendings: list[BorrowedLoan] = []
        # A queue of dead references, and of borrows that are being ended. Finalizers add to it with `append`, which
        # runs no Python code. If this queue is not empty, the next call checks which loans are no longer in use.
        self._gone: deque[weakref.ref[Any] | BorrowedLoan] = deque()

    def watch(self, borrowed: Borrowed, lending: BorrowedLoan) -> None:
        """Keep the loans until nothing uses them. At first `borrowed` uses them, and after its end the views do."""
        lending.holder = weakref.ref(borrowed, self._gone.append)
        self._lendings.append(lending)

    def end(self, lending: BorrowedLoan) -> None:
        """Give the loans back, either now or as soon as they are not in use any more."""
        self._gone.append(lending)  # first, so that the next call repeats `end` if it is interrupted
        lending.forget_views()
        if lending.in_use():
            lending.call_when_gone(self._gone.append)
        if not lending.in_use():
            for call in lending.lending_calls():
                call.link.release(call.id)
            lending.return_loans()
            with contextlib.suppress(ValueError):  # another thread has already removed it
                self._lendings.remove(lending)
        with contextlib.suppress(ValueError):
            self._gone.remove(lending)

    def sweep(self) -> None:
        """Give back the loans whose use has ended since the last sweep."""
        seen = list(self._gone)
        if not seen:
            return
        for lending in list(self._lendings):
            if not lending.in_use():
                self.end(lending)
        for found in seen:  # last, so that the next call repeats `sweep` if it is interrupted
            if isinstance(found, BorrowedLoan) and found in self._lendings:  # another thread is ending it
                continue
            with contextlib.suppress(ValueError):  # another thread has already removed it
                self._gone.remove(found)
