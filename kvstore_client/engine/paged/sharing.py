"""Whether the engine shares blocks: while the weights of all its ranks are those that its keys name.

Each rank looks at its weights when a plan asks for that (`weights`): a *check*. What a step computes is covered by the
next check, which may be in the same step, as checks are made before the model's work. It is sent when all ranks agree
at that check. A step in which loads begin has a check, and so has one that saves what another engine waits for, one
without tokens if anything waits for a check, and otherwise one step in so many that checks take 0.2 % of the engine's
time.

When a rank's weights have changed, sharing stops. It goes on when they are the old ones again, or when all ranks were
told one new name.

Thread: the engine core's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from typing import Final

from kvstore_client.engine.paged.plan import StepPlan, WorkerReport

# The share of the engine's time that checks may take which nobody waits for, and how close they follow each other at
# most.
CHECKS_SHARE: Final = 0.002
LEAST_PAUSE_S: Final = 0.1
# The share of the slots whose blocks may wait for a check.
WAITING_SHARE: Final = 0.125
# How long an engine without requests goes on to step for an answer.
ANSWER_S: Final = 1.0


class Sharing:
    """The checks of one engine. Not thread-safe.

    checks: whether all ranks can check their weights. name: what the weights are called; what they were called at the
    start is the engine's `weights_version`. stopped: nothing may be loaded or saved.
    """

    def __init__(self, ranks: int = 1, *, checks: bool = False, name: str = "", slots: int = 1) -> None:
        """slots: of the host pool."""
        self.checks = checks
        self.name = self.first_name = name
        self.stopped = False
        self._ranks = ranks
        self._most_waiting = max(1, int(slots * WAITING_SHARE))
        self._asked = 0
        self._asked_now = False  # in the plan that is being made
        self._asked_at = -math.inf
        self._wanted = False  # a check is to be made in any case
        self._answers: Counter[int] = Counter()  # check -> ranks that agree
        self._agreed = 0
        self._told = 0  # the ranks know of agreement up to this check
        self._waiting = 0  # blocks that wait for a check
        self._names: dict[int, str] = {}  # what each rank was told
        self._costs: deque[float] = deque(maxlen=5)
        self._asked_times: dict[int, float] = {}  # of checks that not all ranks have agreed on yet
        self._fresh_at = -math.inf  # when the newest check was asked for that all ranks agree on
        self._stopped_at = 0  # the last check that had been asked for when sharing stopped

    @property
    def covering(self) -> int:
        """The check that covers what is done in the plan that is being made; 0: there are no checks."""
        return self._asked + (not self._asked_now) if self.checks else 0

    @property
    def agreed(self) -> int:
        """All ranks agree up to this check."""
        return self._agreed

    @property
    def is_named_in_part(self) -> bool:
        """Whether some ranks were told another name than others."""
        names = list(self._names.values())  # at once: other threads ask, too
        return bool(names) and (len(names) < self._ranks or len(set(names)) > 1)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for a check: an engine without requests should go on to step."""
        answered = self._told >= self._asked or (self._ranks == 1 and self._agreed >= self._asked)
        if not self._waiting and answered:
            return False
        return not self._waiting_in_vain

    @property
    def _waiting_in_vain(self) -> bool:
        unanswered = self._agreed < self._asked and time.monotonic() - self._asked_at > ANSWER_S
        return self.stands_still or unanswered

    @property
    def stands_still(self) -> bool:
        """Whether nothing may be loaded or saved now."""
        return self.stopped or self.is_named_in_part

    def is_unheard(self, since: float) -> bool:
        """Whether no check agrees that was made after this time, by `time.monotonic`; one is made with the next step.
        False as well when the ranks do not answer."""
        now = time.monotonic()
        if not self.checks or self.stands_still or self._fresh_at >= since or now - since > ANSWER_S:
            return False
        self._wanted |= self._asked_at < since
        return True

    @property
    def _pause_s(self) -> float:
        return max(LEAST_PAUSE_S, statistics.median(self._costs or [0.0]) / CHECKS_SHARE)

    def ask(self) -> int:
        """Have a check made with this plan. -> its number; 0: there are no checks."""
        if self.checks and not self._asked_now:
            self._asked += 1
            self._asked_now = True
            self._asked_at = self._asked_times[self._asked] = time.monotonic()
        return self.covering

    def plan(self, plan: StepPlan, *, hurries: bool) -> None:
        """The plan is complete but for its check. hurries: another engine waits for what it saves."""
        if not self.checks:
            plan.weights = self.name
            return
        blocks = len(plan.saves.copied) + len(plan.saves.sent) if plan.saves is not None else 0
        self._waiting += blocks
        if (
            self._wanted
            or (blocks and hurries)
            or self._waiting > self._most_waiting
            or (plan.idle and self._waiting)
            or time.monotonic() - self._asked_at > self._pause_s
        ):
            self.ask()
        plan.covering, plan.weights = self.covering, self.name
        if self._asked_now:
            plan.check = self._asked
            self._wanted, self._waiting = False, 0
        plan.agreed = self._told = self._agreed
        self._asked_now = False

    def take(self, report: WorkerReport) -> None:
        """What ranks have told; `new_name`, `has_changed` and `is_restored` say what follows from it."""
        self._names.update(report.names)
        if report.check_seconds:
            self._costs.append(report.check_seconds)
        self._answers.update(report.agreed)
        for check in sorted(self._answers):
            if self._answers[check] >= self._ranks:
                self._agreed = max(self._agreed, check)
        for check in [each for each in self._asked_times if each <= self._agreed]:
            self._fresh_at = max(self._fresh_at, self._asked_times.pop(check))
        for check in [each for each in self._answers if each <= self._agreed]:
            del self._answers[check]

    def new_name(self) -> str | None:
        """The name that all ranks were told, once. The weights are called so from now on, and sharing goes on."""
        if not self._names or self.is_named_in_part:
            return None
        name = next(iter(self._names.values()))
        self._names.clear()
        if name == self.name and not self.stopped:
            return None
        self.name = name
        self.stopped = False
        self.distrust()
        return name

    def has_changed(self, report: WorkerReport) -> bool:
        """Whether the report says for the first time that some rank has other weights than before: sharing stops."""
        if self.stopped or not report.changed:
            return False
        self.stop()
        return True

    def is_restored(self) -> bool:
        """Whether a check agrees that was asked for after sharing had stopped: it goes on."""
        if not self.stopped or not self.checks or self._agreed <= self._stopped_at:
            return False
        self.stopped = False
        self.distrust()
        return True

    def stop(self) -> None:
        """From now on nothing is loaded or saved."""
        self.stopped = True
        self._stopped_at = self._asked
        self.distrust()

    def distrust(self) -> None:
        """What was checked before says nothing any more."""
        self._waiting = 0
        self._wanted = True
        self._fresh_at = -math.inf
        self._asked_times.clear()


def salt_name(sharing: Sharing) -> str:
    """What the keys must name: nothing while the weights are those of the start, which the namespace names."""
    return "" if sharing.name == sharing.first_name else sharing.name
