"""The operations on one prompt of the toy transformer, and the checks after each.

The prompt is computed in some blocks of the cache and loaded into others, both in random order. Before each load the
whole cache is filled with NaN. Of computed blocks, only a sum over the bytes of each is kept, because a second cache
for a long prompt would take as much device memory as the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu.names import COMPUTED, HOST, IN_CACHE, PINNED, SAVED, SHARED, TCP
from benchmarks.gpu.toy_model import BLOCK_TOKENS, LOGITS, ToyModel
from benchmarks.gpu.toy_rank import TcpGuard, ToyRank
from benchmarks.remote_kv_cache.harness import Operation
from benchmarks.remote_kv_cache.processes import kvstore_server
from kvstore_client import KVStoreClient, Namespace, prefix_keys
from kvstore_client.engine.guard import StoreGuard

_SHARDS: Final = 4
_TIMEOUT_S: Final = 60.0
_SUMMED_AT_ONCE: Final = 1024  # blocks: 64 MiB for blocks of 64 KiB a layer
# The control replaces at most this many chunks of the prompt: all of a short prompt, the beginning of a long one.
_CONTROL_CHUNKS: Final = 4
# The largest difference of logits must be at least the first value after other blocks, and at most the second value
# after the same blocks. After the same blocks it is 0, unless the device's kernels add in another order each time.
_CONTROL: Final = LOGITS / 6
_SAME: Final = LOGITS / 60


@dataclass
class Rig:
    """A model with its cache, and two ranks that load into it from one server. client: a client of that server."""

    model: ToyModel
    ranks: dict[str, ToyRank]
    client: KVStoreClient
    odd: torch.Tensor  # see `fingerprints`

    def idle(self) -> None:
        """Wait until the device is idle."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def fingerprints(self, block_ids: Sequence[int]) -> torch.Tensor:
        """(layers, blocks): sums of each block's 64-bit words, each multiplied by its own odd number, modulo 2^64. If
        one word of a block changes, so does the sum. A block with several wrong words has the right sum with a
        probability of 2^-64.
        """
        ids = torch.as_tensor(block_ids, device=self.model.device)
        sums = []
        for layer in self.model.cache:
            words = layer.flatten(1).view(torch.int64)
            sums.append(torch.cat([(words[some] * self.odd).sum(dim=1) for some in ids.split(_SUMMED_AT_ONCE)]))
        return torch.stack(sums)


@contextlib.contextmanager
def make_rig(model: ToyModel, tokens: int) -> Iterator[Rig]:
    """A rig whose cache, host pool and server have room for one prompt of this length."""
    shape, device = model.shape, model.device
    blocks = -(-tokens // BLOCK_TOKENS) + 8
    namespace = Namespace(model=shape.name, dtype="bfloat16", block_tokens=BLOCK_TOKENS, block_bytes=shape.block_bytes)
    shards = _SHARDS if device.type == "cuda" else 1
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(kvstore_server(blocks * shape.block_bytes, shards))
        client = stack.enter_context(KVStoreClient(endpoint, namespace, timeout_s=_TIMEOUT_S))
        model.resize(blocks)
        # Nearly half of the slots may wait to be sent: all blocks of a prompt of a few chunks, or 8 GiB of a long
        # prompt.
        slots = max(blocks + 64, min(2 * blocks + 128, 4224))
        ranks: dict[str, ToyRank] = {}
        guards: tuple[tuple[str, int, type[StoreGuard]], ...] = ((SHARED, slots, StoreGuard), (TCP, 8, TcpGuard))
        for name, room, guard in guards:
            ranks[name] = ToyRank(model.kv_caches(), endpoint, namespace, room, timeout_s=_TIMEOUT_S, guard=guard)
            stack.callback(ranks[name].close)
        words = shape.block_bytes // shape.layers // 8
        generator = torch.Generator(device).manual_seed(3)
        odd = torch.randint(-(2**62), 2**62, (words,), device=device, generator=generator) * 2 + 1
        yield Rig(model, ranks, client, odd)


class Prompt:
    """The operations on one prompt. COMPUTED and SAVED come first, because the others need the blocks that SAVED
    stores."""

    def __init__(self, rig: Rig, tokens: int) -> None:
        self._rig = rig
        shape, self._chooser = rig.model.shape, np.random.default_rng(tokens)
        self._prompt = self._chooser.integers(0, shape.vocabulary, tokens)
        self.tokens = tokens
        self.loaded = (tokens - 1) // BLOCK_TOKENS  # blocks: an engine always computes the last token
        self._rest = self.loaded * BLOCK_TOKENS
        self.full = tokens // BLOCK_TOKENS
        self.kv_bytes = self.loaded * shape.block_bytes
        self.keys = [bytes(key) for key in prefix_keys(self._prompt, BLOCK_TOKENS)]
        blocks = -(-tokens // BLOCK_TOKENS)
        # The blocks in which the prompt is computed, and those into which it is loaded.
        self._at, self._to = (self._chooser.permutation(rig.model.cache.shape[1])[:blocks].tolist() for _ in range(2))
        # The logits after the last load, after one pass over the whole prompt, and after the prompt's own blocks.
        self._logits = self._whole = self._right = torch.empty(0)
        self._expected: torch.Tensor | None = None  # the sums of the saved bytes
        self._checked_loads, self._loaded_differs = 0, 0.0
        self._bytes_equal = self._tokens_equal = self._same_bytes = True
        self._one_pass: dict[str, Any] = {}
        self._control: dict[str, Any] = {}

    def operations(self) -> list[Operation]:
        """Return the operations in the order of the uncounted round: the store is filled before it is read."""
        ranks, keys, to = self._rig.ranks, self.keys[: self.loaded], self._to[: self.loaded]
        loads: dict[str, Callable[[], object]] = {
            HOST: self._load_from_host,
            SHARED: lambda: ranks[SHARED].load(keys=keys, block_ids=to),
            TCP: lambda: ranks[TCP].load(keys=keys, block_ids=to),
        }
        return [
            Operation(COMPUTED, self._compute, before=self._rig.idle, after=self._check_computed),
            Operation(SAVED, self._compute_and_save, before=self._forget, after=self._check_saved),
            Operation(PINNED, self._pinned_copy, self.kv_bytes, before=self._rig.idle),
            Operation(IN_CACHE, self._first_token, before=self._put_into_cache, after=self._check_loaded),
            *(
                Operation(name, self._behind(load), self.kv_bytes, PINNED, self._poison, self._check_loaded)
                for name, load in loads.items()
            ),
        ]

    def found(self) -> dict[str, Any]:
        """Return what the checks found, even if the device has failed. The logits of one pass differ from those after
        the prompt's own blocks, because larger chunks round differently."""
        return {
            "bytes_equal": self._bytes_equal,
            "tokens_equal": self._tokens_equal,
            "checked_loads": self._checked_loads,
            "loaded_differs": self._loaded_differs,
            "computes_to_the_same_bytes": self._same_bytes,
            "paths": {name: rank.path for name, rank in self._rig.ranks.items()},
            **self._one_pass,
            **self._control,
        }

    def _compute(self) -> None:
        self._whole = self._rig.model.compute(self._prompt, self._at)
        self._whole.argmax().item()

    def _sums(self) -> torch.Tensor:
        return self._rig.fingerprints(self._at[: self.full])

    def _check_computed(self) -> None:
        if self._expected is not None:
            self._same_bytes &= self._sums().equal(self._expected)

    def _forget(self) -> None:
        self._rig.client.delete(self.keys)
        self._rig.idle()

    def _compute_and_save(self) -> None:
        self._whole = self._rig.model.compute(self._prompt, self._at, computed=self._saving(self.keys))
        self._whole.argmax().item()

    def _saving(self, keys: Sequence[bytes]) -> Callable[[int, int], None]:
        def save(first: int, end: int) -> None:
            self._rig.ranks[SHARED].save(keys[first:end], self._at[first:end], range(first, end))

        return save

    def _check_saved(self) -> None:
        """Keep the sums of the blocks that were just computed, because loads must return the same bytes."""
        self._rig.ranks[SHARED].settle(self.full)
        self._check_computed()
        self._expected = self._sums()
        self._right = self._rig.model.compute(self._prompt, self._at, self._rest)
        self._one_pass = {
            "one_pass_differs": _largest(self._whole, self._right),
            "token_is_that_of_one_pass": bool(self._right.argmax() == self._whole.argmax()),
        }

    def _pinned_copy(self) -> None:
        rows: Any = torch.from_numpy(self._rig.ranks[SHARED].pool.reshape(-1)[: self.kv_bytes])
        cache: Any = self._rig.model.cache.view(torch.uint8).view(-1)[: self.kv_bytes]
        cache.copy_(rows, non_blocking=True)
        self._rig.idle()

    def _poison(self) -> None:
        self._rig.model.cache.fill_(float("nan"))
        self._rig.idle()

    def _load_from_host(self) -> None:
        slots = list(range(self.loaded))
        self._rig.ranks[SHARED].load(host_slots=slots, host_block_ids=self._to[: self.loaded])

    def _put_into_cache(self) -> None:
        self._poison()
        self._load_from_host()
        self._rig.idle()

    def _first_token(self) -> None:
        self._logits = self._rig.model.compute(self._prompt, self._to, self._rest)
        self._logits.argmax().item()

    def _behind(self, load: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            load()
            self._first_token()

        return run

    def _check_loaded(self) -> None:
        assert self._expected is not None
        self._bytes_equal = self._rig.fingerprints(self._to[: self.loaded]).equal(self._expected[:, : self.loaded])
        if not self._bytes_equal:
            raise AssertionError("the bytes loaded are not those that were computed")
        differs = _largest(self._logits, self._right)
        self._loaded_differs = max(self._loaded_differs, differs)
        self._tokens_equal = bool(self._logits.argmax() == self._right.argmax())
        if not (self._tokens_equal and differs < _SAME):  # also true for NaN
            raise AssertionError(f"the logits after loaded blocks differ from those after computed ones by {differs:g}")
        self._checked_loads += 1

    def check_control(self) -> None:
        """Load another prompt's blocks in place of the first ones, followed by the prompt's own: the logits must
        differ. This check comes last, because it leaves blocks of the other prompt in the pool."""
        assert self._expected is not None
        model, rank = self._rig.model, self._rig.ranks[SHARED]
        blocks = min(self.loaded, _CONTROL_CHUNKS * model.shape.chunk // BLOCK_TOKENS)
        other = self._chooser.integers(0, model.shape.vocabulary, blocks * BLOCK_TOKENS)
        keys = [bytes(key) for key in prefix_keys(other, BLOCK_TOKENS)]
        model.compute(other, self._at[:blocks], computed=self._saving(keys))
        rank.settle(blocks)
        self._put_into_cache()
        same = self._rig.fingerprints(self._to[: self.loaded]) == self._expected[:, : self.loaded]
        self._first_token()
        differs = _largest(self._logits, self._right)
        self._control = {"control_tokens": blocks * BLOCK_TOKENS, "control_differs": differs}
        if same[:, :blocks].any() or not same[:, blocks:].all():
            raise AssertionError("blocks of another prompt were not loaded into the right blocks of the cache")
        if not differs > _CONTROL:
            raise AssertionError(f"after blocks of another prompt, the logits differ only by {differs:g}")


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference."""
    return float((one - other).abs().max())
