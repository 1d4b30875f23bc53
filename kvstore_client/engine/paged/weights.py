"""Repeatedly takes a fingerprint of a rank's weights, to check whether they are still the weights that the keys of its
blocks name.

Weights may change while the engine runs, and engines do not report it. A fingerprint is a hash of a few elements of
every parameter, and of every buffer that is saved with a model. The elements are on a diagonal of the tensor, so they
come from many rows and columns. Training, merging, reloading or discarding weights changes some of these elements. A
change that affects only other elements is not noticed.

The elements are accessed through views, which are kept. To take a fingerprint, the views are concatenated. On a CPU,
this is done immediately. On a device, it is done on another stream than the model's, after the work queued so far, and
no thread waits for the device.

A *check* is a fingerprint with a number that the scheduler's half assigns. Its result is known some time later. Blocks
that were computed since the last agreeing check must not leave the rank before the next check agrees. If the engine has
several ranks, the scheduler's half informs each of them in which checks all ranks agree.

Only the model's thread uses this module, except for `all_agree`.
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

# The number of elements taken from each tensor. A small update of bfloat16 weights changes one element in a hundred,
# but thousands of elements are taken in total.
SAMPLES_PER_WEIGHT: Final = 16
# The largest extent of a view in elements that kernels with 32-bit indices can read.
MOST_SPAN: Final = (1 << 31) - 1
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AsleepError(RuntimeError):
    """The weights are not in memory, because the engine sleeps."""

    def __init__(self) -> None:
        super().__init__("kvstore: the engine sleeps, so its weights are not in memory; expected one that is awake")


class RunningFingerprint:
    """A fingerprint that is being taken. Only the model's thread may use it."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]], shapes: bytes, event: torch.cuda.Event | None) -> None:
        self._parts = parts
        self._shapes = shapes
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def value(self) -> bytes:
        """Return the fingerprint. This waits for the device unless it is `done`."""
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
        """`models`: a function that returns the engine's present model and its draft models. `awake`: a function that
        returns whether the memory of the weights may be accessed."""
        self._models = models
        self._awake = awake
        self._roots: Sequence[torch.nn.Module] = ()
        # The dictionaries of the models, and for each a name and the module or tensor that it has under this name.
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._held: list[object] = []
        self._tensors: list[torch.Tensor] = []  # tensors with memory of their own
        self._addresses: list[int] = []  # the addresses of these tensors
        self._on_host: list[npt.NDArray[Any]] = []  # views of the tensors' memory
        self._on_devices: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._shapes = b""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self) -> RunningFingerprint:
        """Start to take a fingerprint. Raises AsleepError, RuntimeError of torch, and the errors of `models`."""
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
                    event = torch.cuda.Event()  # the last copy's event is enough, because a rank has one device
                    event.record(stream)
        return RunningFingerprint(parts, self._shapes, event)

    def _is_as_seen(self, models: Sequence[torch.nn.Module]) -> bool:
        """Return whether the models have the same tensors as before, at the same addresses."""
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
        views = diagonal(bits, SAMPLES_PER_WEIGHT)
        if bits.device.type == "cpu":
            # numpy concatenates these views in one call, which widens smaller integers. A torch call for the same views
            # takes ten times as long.
            self._on_host += [view.numpy() for view in views]
        else:
            self._on_devices.setdefault((bits.device, bits.element_size()), []).extend(views)


def _plain(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that make up this tensor and have memory of their own. These are either the tensor itself or
    the tensors that a quantized tensor wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, inner), f"{name}.{inner}")
    elif tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
        yield name, tensor


def diagonal(tensor: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Return `most` elements of a tensor, or fewer if its longest side has fewer. They are evenly spread along each
    side that is long enough. The result is a list of views with one dimension."""
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
    """A rank's report about its checks since the last report. `agreed`, `changed`: the numbers of the checks with this
    result. `cost_s`: how long the last check occupied the model's thread. `name`: the name of the rank's weights, if
    the scheduler's half does not know it."""

    agreed: list[int]
    changed: list[int]
    cost_s: float
    name: str | None


class WeightsWatch:
    """A rank's knowledge of its weights. Only the model's thread may use it, but any thread may call `all_agree`."""

    def __init__(self, fingerprints: Fingerprints | None, name: str, *, alone: bool) -> None:
        """`fingerprints`: takes the fingerprints. If it is None, the weights cannot be checked, and no check is
        requested. `name`: the name of the weights at the start. `alone`: whether the engine has only one rank. Raises
        the errors of `Fingerprints.take`."""
        self.name = name
        self._fingerprints = fingerprints
        self._alone = alone
        self._lock = threading.Lock()
        self._expected = fingerprints.take().value() if fingerprints is not None else b""
        self._named = {name: self._expected}  # the fingerprint for each name so far
        self._under_way: list[tuple[int, RunningFingerprint, float]] = []
        self._mine = 0  # up to this check, this rank's weights are unchanged
        self._all = 0  # up to this check, all ranks agree
        self._void = 0  # blocks of checks up to this one must not be used
        self._report = CheckReport([], [], 0.0, None)
        watches.add(self)

    @property
    def checks(self) -> bool:
        """Whether the weights can be checked."""
        return self._fingerprints is not None

    def begin(self, plan: StepPlan) -> None:
        """Note that a step begins. If its plan was made before the scheduler's half knew the present name of the
        weights, the plan's loads and saves are void."""
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
                log.exception("kvstore: the weights cannot be read, so nothing is loaded or saved in this step")
                self._avoid(check)
            else:
                self._under_way.append((check, taken, time.monotonic() - began))
                self.poll()

    def poll(self) -> None:
        """Process the checks that are done."""
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
        """Return whether this rank's weights are right for the blocks of this check, or None if that is not known
        yet."""
        if not check or check <= self._void:
            return not check
        return True if check <= self._mine else None

    def all_agree(self, check: int) -> bool | None:
        """Return whether the weights of all ranks are right for the blocks of this check, or None if that is not known
        yet."""
        with self._lock:
            if not check or check <= self._void:
                return not check
            return True if check <= self._all else None

    def finish(self) -> None:
        """Make a last check, because no further step follows. With several ranks, no check is made, because no rank
        would learn the results of the others."""
        if self._alone and self._fingerprints is not None:
            last = max([self._mine, self._void, *(check for check, *_ in self._under_way)]) + 1
            try:
                self._under_way.append((last, self._fingerprints.take(), 0.0))
                self._under_way[-1][1].value()
                self.poll()
            except Exception as error:
                log.warning("kvstore: blocks that wait for a last check of the weights are not sent: %s", error)

    def rename(self, name: str) -> None:
        """Give the present weights this name. Unsent blocks and loads in progress are given up. Raises ValueError if
        other weights had this name before. Also raises the errors of `Fingerprints.take`."""
        found = self._fingerprints.take().value() if self._fingerprints is not None else b""
        if self._named.get(name, found) != found:
            raise ValueError(
                f"kvstore: other weights of this engine already had the name {name!r}; expected a new name for new "
                "weights"
            )
        if (name, found) != (self.name, self._expected):
            self._avoid(max([self._mine, self._void, self._all, *(check for check, *_ in self._under_way)]))
            self._under_way.clear()
            self.name, self._expected = name, found
            self._named[name] = found
        self._report.name = name

    def take_report(self) -> CheckReport | None:
        """Return the report about the time since the last call, or None if there is nothing to report."""
        self.poll()
        report, self._report = self._report, CheckReport([], [], 0.0, None)
        return report if report.agreed or report.changed or report.name is not None else None


watches: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()  # all watches of this process
