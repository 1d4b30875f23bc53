"""kvstore for the toy engine: a `Connector` over `kvstore_client.engine`, with a CPU tier between cache and store.

    python examples/paged_engine/adapter.py [--endpoint HOST:PORT]

docs/adding-an-engine.md explains it step by step. Needs torch and a running server: `kvstore-server` or `make serve`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from functools import partial

import numpy as np
import torch
from engine import BLOCK_TOKENS, Engine, Request

from kvstore_client import Namespace
from kvstore_client.engine.guard import Counters, Purges, StoreGuard
from kvstore_client.engine.lookup import PrefixLookup, PrefixLookups
from kvstore_client.engine.paged.host_tier import HostTier
from kvstore_client.engine.paged.layout import BlockLayout
from kvstore_client.engine.paged.plan import Load, RankStore, SavedBlock, Saves, StepPlan, WorkerReport
from kvstore_client.engine.paged.sends_under_way import SendsUnderWay
from kvstore_client.engine.paged.worker import WorkerHalf

LOAD_S = 5.0  # blocks that have not come by then are computed


class KVStoreConnector:
    """The connector of an engine with one rank. Both halves are in one process here, so a plan is passed on
    unchanged."""

    def __init__(self, endpoint: str, engine: Engine, *, cpu_blocks: int = 128, timeout_s: float = 5.0) -> None:
        layout = BlockLayout(engine.kv_caches, engine.num_blocks)
        # The namespace names everything that determines a block's bytes, except the tokens, which are in the keys.
        self.namespace = Namespace(
            model=engine.name,
            dtype="float32",
            block_tokens=BLOCK_TOKENS,
            block_bytes=layout.block_bytes,
            layout=layout.description,
        )
        self.counters = Counters()
        guard = partial(StoreGuard, endpoint, self.namespace, timeout_s=timeout_s, counters=self.counters)
        self._guard = guard()
        self._lookups = PrefixLookups([self._guard], timeout_s=timeout_s, counters=self.counters)
        self._purges = Purges([self._guard])
        self._tier = HostTier(cpu_blocks, keep=True)
        self._sends = SendsUnderWay(ranks=1, slices=1)
        store = RankStore(self.namespace, cpu_blocks)
        self._worker = WorkerHalf(
            guard(), layout, store=store, timeout_s=timeout_s, replica=(0, 1), counters=self.counters
        )
        self._jobs = itertools.count()
        self._plan = StepPlan()
        self._saves = Saves(next(self._jobs))
        self._copying: dict[int, list[SavedBlock]] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._asked: dict[str, PrefixLookup] = {}
        self._saved: dict[str, int] = {}  # the number of a request's leading blocks that are saved, or need not be
        self._last_job: dict[str, int] = {}
        self._read_slots: dict[str, list[int]] = {}  # the slots of the CPU tier that a load reads

    # ---- the scheduler's half --------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request) -> int | None:
        if request.id not in self._keys:
            if self._purges.noticed():
                self._tier.clear()
            keys = [row.tobytes() for row in self.namespace.keys(request.tokens)]
            self._keys[request.id] = keys
            # The last token is always computed, because the request needs its output.
            self._asked[request.id] = self._lookups.ask(keys[: (len(request.tokens) - 1) // BLOCK_TOKENS])
        lookup = self._asked[request.id]
        stored = self._lookups.poll(lookup)
        if stored is None:
            return None
        here = self._tier.find(lookup.keys) >= 0
        found = stored
        while found < len(here) and here[found]:
            found += 1
        self._saved[request.id] = stored
        return found * BLOCK_TOKENS

    def load(self, request: Request, tokens: int) -> None:
        count = tokens // BLOCK_TOKENS
        keys, blocks = self._keys[request.id][:count], request.blocks[:count]
        slots = self._tier.acquire(keys).tolist()
        here = [index for index in range(count) if slots[index] >= 0]
        away = [index for index in range(count) if slots[index] < 0]
        self._read_slots[request.id] = [slots[index] for index in here]
        self._plan.loads.append(
            Load(
                request.id,
                host_slots=[slots[index] for index in here],
                host_block_ids=[blocks[index] for index in here],
                keys=[keys[index] for index in away],
                block_ids=[blocks[index] for index in away],
                within_s=LOAD_S,
            )
        )

    def computed(self, request: Request) -> None:
        """Save the blocks that are complete now. If all slots are in use, it is tried again later."""
        keys, first = self._keys[request.id], self._saved[request.id]
        complete = range(first, request.computed // BLOCK_TOKENS)
        for index, slot in zip(complete, self._tier.reserve([keys[at] for at in complete]).tolist(), strict=True):
            if slot >= 0:
                parent = keys[index - 1] if index else None
                self._saves.copied.append(SavedBlock(keys[index], slot, request.blocks[index], parent))
                self._last_job[request.id] = self._saves.job
            elif not self._tier.is_known(slot):
                break
            self._saved[request.id] = index + 1

    def ended(self, request: Request) -> bool:
        for records in (self._keys, self._asked, self._saved):
            records.pop(request.id)
        job = self._last_job.pop(request.id, -1)
        if job != self._saves.job and job not in self._copying:
            return False
        self._plan.held[request.id] = job
        return True

    def _take(self, report: WorkerReport) -> None:
        """Process what the rank has finished: copied blocks can be loaded from the CPU tier, and sent blocks may be
        evicted."""
        for job in report.copied:
            blocks = self._copying.pop(job)
            slots = [block.slot for block in blocks]
            self._tier.commit(slots)
            self._tier.link([block.key for block in blocks], [block.parent for block in blocks])
            self._tier.hold(slots)  # until the blocks are sent
            if job in report.broken:
                self._tier.drop(slots)
        self._tier.release([sent.slot for sent in self._sends.update(report.released, report.stored)])

    # ---- the worker's half ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        plan, self._plan = self._plan, StepPlan()
        self._worker.begin_step(plan)
        for load in plan.loads:
            self._worker.loads.load(load)

    def end_step(self) -> tuple[dict[str, set[int]], set[str]]:
        plan, self._plan = self._plan, StepPlan()
        if self._saves:
            plan.saves, self._saves = self._saves, Saves(next(self._jobs))
            plan.saves.generations = self._purges.known
            self._copying[plan.saves.job] = plan.saves.copied
            self._sends.begin(plan.saves)
        self._worker.begin_step(plan)
        self._worker.saves.save()  # the copies come after the step's computation
        loaded, failed = self._worker.loads.take_loaded(), self._worker.loads.take_failed_block_ids()
        for request_id in loaded:
            self._tier.release(self._read_slots.pop(request_id))
            if failed:  # these blocks are computed instead, and may be missing in the store
                self._saved[request_id] = 0
        free = self._worker.saves.take_saved()
        if (report := self._worker.take_report()) is not None:
            self._take(report)
        return dict.fromkeys(loaded, failed), free

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until the store has all saved blocks. Return whether it has."""
        deadline = time.monotonic() + timeout_s
        while (self._copying or len(self._sends)) and time.monotonic() < deadline:
            self.end_step()
            time.sleep(0.001)
        return not self._copying and not len(self._sends)

    def close(self) -> None:
        self._worker.close()
        self._lookups.close()
        self._guard.close()


def main() -> int:
    torch.set_num_threads(1)  # the tensors are small
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default=os.environ.get("KVSTORE_ENDPOINT", "127.0.0.1:7070"))
    options = parser.parse_args()
    prompts = np.random.default_rng(time.time_ns()).integers(0, 512, (2, 200)).tolist()
    prompts[1][:100] = prompts[0][:100]  # a common prefix
    expected, answers = Engine().generate(prompts), []
    for name in ("first engine, nothing cached", "second engine, the same prompts"):
        engine = Engine()
        engine.connector = connector = KVStoreConnector(options.endpoint, engine)
        answers.append(engine.generate(prompts))
        print(f"{name}: computed {engine.tokens_computed} of {sum(map(len, prompts))} tokens")
        connector.settle()
        connector.close()
    equal = answers == [expected, expected]
    print("all answers are equal" if equal else "the answers DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
