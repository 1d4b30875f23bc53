"""Whether a rank's weights are those that its blocks are named for: a fingerprint of them, taken again and again.

Weights may change while the engine runs, and engines do not say so. A fingerprint is a hash of a few elements of every
parameter, and of every buffer that is saved with a model: those on a diagonal of the tensor, so of many rows and
columns. Whatever trains, merges, reloads or discards weights changes some of them; what changes only other elements is
not seen.

The elements are views, which are kept. To take a fingerprint is one concatenation of the views: on a CPU at once, on a
device on a stream beside the model's, behind the work queued so far. Nothing waits for the device.

A *check* is a fingerprint with a number, which the scheduler's half gives. Its verdict is known some time later. What
was computed since the last check that agreed is not to leave the rank before the next one agrees. A rank whose engine
has others learns from the scheduler's half what all agree on.

Thread: the model's, but for `all_agree`.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvstore_client.engine.paged.plan import VOID, StepPlan

log = logging.getLogger("kvstore_client")

# Elements of each tensor. Small updates of bfloat16 weights change one element in a hundred; there are thousands.
SAMPLES: Final = 16
# Kernels that index with 32 bits read a view only if it spans less.
MOST_SPAN: Final = (1 << 31) - 1
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AsleepError(RuntimeError):
    """The weights' memory is not there."""

    def __init__(self) -> None:
        super().__init__("kvstore: the engine sleeps, so its weights are not in memory; expected one that is awake")


class Taken:
    """A fingerprint that is being taken. Thread: the model's."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]], shapes: bytes, event: torch.cuda.Event | None) -> None:
        self._parts = parts
        self._shapes = shapes
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def value(self) -> bytes:
        """Waits for the device unless it is `done`."""
        if self._event is not None:
            self._event.synchronize()
        found = xxhash.xxh3_128(self._shapes)
        for part in self._parts:
            found.update(part)
        return found.digest()


class Fingerprints:
    """Takes fingerprints of models' weights. Not thread-safe."""

    def __init__(
        self, models: Callable[[], Sequence[torch.nn.Module]], awake: Callable[[], bool] = lambda: True
    ) -> None:
        """models: the engine's model and those that draft for it, as they are now. awake: whether the memory of the
        weights may be touched."""
        self._models = models
        self._awake = awake
        self._roots: Sequence[torch.nn.Module] = ()
        # Where a model holds what, modules and tensors: what is in each dictionary under a name.
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._held: list[object] = []
        self._tensors: list[torch.Tensor] = []  # those with memory of their own
        self._addresses: list[int] = []  # and where these were
        self._on_host: list[npt.NDArray[Any]] = []  # views, of the same memory, like those on devices
        self._on_devices: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._shapes = b""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self) -> Taken:
        """Raises AsleepError, RuntimeError of torch, and what ``models`` raises."""
        if not self._awake():
            raise AsleepError
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            models = self._models()
            if not self._is_as_seen(models):
                self._look(models)
            parts: list[npt.NDArray[Any]] = [np.concatenate(self._on_host)] if self._on_host else []
            event = None
            for (device, _), views in self._on_devices.items():
                if device.type != "cuda":
                    parts.append(torch.cat(views).cpu().numpy())
                    continue
                stream = self._streams.setdefault(device, torch.cuda.Stream(device))
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    found = torch.cat(views)
                    copied = torch.empty_like(found, device="cpu", pin_memory=True)
                    copied.copy_(found, non_blocking=True)
                    parts.append(copied.numpy())
                    event = torch.cuda.Event()  # of the last one; a rank has one device
                    event.record(stream)
        return Taken(parts, self._shapes, event)

    def _is_as_seen(self, models: Sequence[torch.nn.Module]) -> bool:
        """Whether the models hold the same tensors as before, at the same places."""
        return (
            len(models) == len(self._roots)
            and all(map(operator.is_, models, self._roots))
            and all(map(operator.is_, map(dict.get, self._holders, self._names), self._held))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
        )

    def _look(self, models: Sequence[torch.nn.Module]) -> None:
        self._holders, self._names, self._held, self._tensors, self._addresses = [], [], [], [], []
        self._on_host, self._on_devices = [], {}
        shapes = xxhash.xxh3_128()
        known: set[int] = set()
        self._roots = models
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                for key, child in module._modules.items():
                    self._expect(module._modules, key, child)
                temporary = module._non_persistent_buffers_set
                for holder, skipped in ((module._parameters, ()), (module._buffers, temporary)):
                    for key, held in holder.items():
                        self._expect(holder, key, held)
                        if held is None or key in skipped or id(held) in known:
                            continue
                        known.add(id(held))
                        for inner, tensor in _plain(held):
                            shapes.update(
                                f"{number}/{name}.{key}{inner} {tensor.dtype} {tuple(tensor.shape)};".encode()
                            )
                            self._add(tensor)
        self._shapes = shapes.digest()

    def _expect(self, holder: dict[str, Any], name: str, held: object) -> None:
        self._holders.append(holder)
        self._names.append(name)
        self._held.append(held)

    def _add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)
        self._addresses.append(tensor.data_ptr())
        bits = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = bits.view(_BITS[bits.element_size()])
        views = diagonal(bits, SAMPLES)
        if bits.device.type == "cpu":
            # Joined in one call, which widens smaller integers. A call of torch for as many takes ten times as long.
            self._on_host += [view.numpy() for view in views]
        else:
            self._on_devices.setdefault((bits.device, bits.element_size()), []).extend(views)


def _plain(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own of which this one consists: itself, or those that a quantized one wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, inner), f"{name}.{inner}")
    elif tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
        yield name, tensor


def diagonal(tensor: torch.Tensor, most: int) -> list[torch.Tensor]:
    """So many elements of a tensor, or as many as its longest side has: evenly spread along each side that is long
    enough. Views of one dimension."""
    count = min(most, max(tensor.shape, default=1))
    steps = [(size - 1) // (count - 1) if count > 1 else 0 for size in tensor.shape]
    starts = [(size - 1 - step * (count - 1)) // 2 for size, step in zip(tensor.shape, steps, strict=True)]
    strides = tensor.stride()
    first = tensor.storage_offset() + sum(start * stride for start, stride in zip(starts, strides, strict=True))
    step = sum(step * stride for step, stride in zip(steps, strides, strict=True))
    each = max(1, min(count, MOST_SPAN // max(1, step)))
    return [
        tensor.as_strided((min(each, count - done),), (step,), first + done * step) for done in range(0, count, each)
    ]


@dataclass
class CheckReport:
    """What a rank tells of its checks since the last report. cost_s: how long the model's thread was at the last one.
    name: of its weights, if the scheduler's half does not know it."""

    agreed: list[int]
    changed: list[int]
    cost_s: float
    name: str | None


class WeightsWatch:
    """What a rank knows of its weights. Thread: the model's; `all_agree` may be called from any."""

    def __init__(self, fingerprints: Fingerprints | None, name: str, *, alone: bool) -> None:
        """fingerprints: None: the weights cannot be looked at, and no check is asked for. name: what they are called at
        the start. alone: the engine has one rank. Raises what `Fingerprints.take` raises."""
        self.name = name
        self._fingerprints = fingerprints
        self._alone = alone
        self._lock = threading.Lock()
        self._expected = fingerprints.take().value() if fingerprints is not None else b""
        self._named = {name: self._expected}  # all names given so far
        self._under_way: list[tuple[int, Taken, float]] = []
        self._mine = 0  # up to this check the weights are what they were, as far as this rank knows
        self._all = 0  # and all ranks
        self._void = 0  # what these checks were for must not be used any more
        self._report = CheckReport([], [], 0.0, None)
        watches.add(self)

    @property
    def checks(self) -> bool:
        """Whether the weights can be looked at."""
        return self._fingerprints is not None

    def begin(self, plan: StepPlan) -> None:
        """A step begins. If its plan was made before the scheduler's half heard what the weights are called now, what
        it loads and saves is void."""
        self.poll()
        check, agreed, name = plan.check, plan.agreed, plan.weights
        with self._lock:
            self._all = max(self._all, agreed)
        if name is not None and name != self.name:
            self._report.name = self.name
            self._avoid(max(check, plan.covering))
            for load in plan.loads:
                load.check = VOID
            if plan.saves is not None:
                plan.saves.check = VOID
        elif check and self._fingerprints is not None:
            began = time.monotonic()
            try:
                taken = self._fingerprints.take()
            except AsleepError:
                self._avoid(check)
            except Exception:
                log.exception("kvstore: the weights cannot be looked at, so nothing is loaded or saved in this step")
                self._avoid(check)
            else:
                self._under_way.append((check, taken, time.monotonic() - began))
                self.poll()

    def poll(self) -> None:
        """Take in which checks are done."""
        while self._under_way and self._under_way[0][1].done():
            check, taken, cost_s = self._under_way.pop(0)
            began = time.monotonic()
            agrees = taken.value() == self._expected
            self._report.cost_s = cost_s + time.monotonic() - began
            with self._lock:
                self._mine = check
                if agrees and self._alone:
                    self._all = check
            if agrees:
                self._report.agreed.append(check)
            else:
                self._report.changed.append(check)
                self._avoid(check)

    def _avoid(self, check: int) -> None:
        with self._lock:
            self._void = max(self._void, check)

    def mine_agree(self, check: int) -> bool | None:
        """Whether this rank's weights are right for what the check was for. None: not known yet."""
        if not check or check <= self._void:
            return not check
        return True if check <= self._mine else None

    def all_agree(self, check: int) -> bool | None:
        """Whether those of all ranks are."""
        with self._lock:
            if not check or check <= self._void:
                return not check
            return True if check <= self._all else None

    def finish(self) -> None:
        """Take a last check: no step follows. An engine of several ranks cannot know what the others would say."""
        if self._alone and self._fingerprints is not None:
            last = max([self._mine, self._void, *(check for check, *_ in self._under_way)]) + 1
            try:
                self._under_way.append((last, self._fingerprints.take(), 0.0))
                self._under_way[-1][1].value()
                self.poll()
            except Exception as error:
                log.warning("kvstore: blocks that wait for a last look at the weights are not sent: %s", error)

    def rename(self, name: str) -> None:
        """The weights that are loaded now have this name. What was not sent yet, and loads under way, are given up.
        Raises ValueError if other weights had the name before, and what `Fingerprints.take` raises."""
        found = self._fingerprints.take().value() if self._fingerprints is not None else b""
        if self._named.get(name, found) != found:
            raise ValueError(
                f"kvstore: the weights are called {name!r}, as other weights of this engine were; expected a new name "
                "for new weights"
            )
        if (name, found) != (self.name, self._expected):
            self._avoid(max([self._mine, self._void, self._all, *(check for check, *_ in self._under_way)]))
            self._under_way.clear()
            self.name, self._expected = name, found
            self._named[name] = found
        self._report.name = name

    def take_report(self) -> CheckReport | None:
        """What is to be told; None: nothing."""
        self.poll()
        report, self._report = self._report, CheckReport([], [], 0.0, None)
        return report if report.agreed or report.changed or report.name is not None else None


watches: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()  # of this process
