"""Decides whether the engine shares blocks. It does while the weights of all its ranks are those that its keys name.

A *check* is made when a plan asks for it: each rank then checks its weights (`weights`). The blocks that a step
computes are covered by the check of the same step if there is one, because checks are made before the model's work.
Otherwise, the next check covers them. The blocks are sent when all ranks agree in their check.

A check is made in each step that begins loads, and in each step that saves blocks for which another engine waits. It is
also made in a step without tokens if blocks wait for a check. Other checks are made so rarely that they take 0.2 % of
the engine's time.

When a rank's weights have changed, sharing stops. It resumes either when all ranks have the old weights again, or when
all ranks were given the same new name for their weights.

Only the engine core's thread uses this module, except where a comment says otherwise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from typing import Final

from kvstore_client.engine.paged.plan import StepPlan, WorkerReport

# For checks that no block waits for: the share of the engine's time that they take, and the shortest time between two.
CHECKS_SHARE: Final = 0.002
LEAST_PAUSE_S: Final = 0.1
# The fraction of the slots whose blocks may wait for a check.
CHECKS_WAITING_SHARE: Final = 0.125
# How long an engine without requests continues to make steps in order to get the answer to a check.
CHECK_ANSWER_S: Final = 1.0


class SharingChecks:
    """The checks of one engine. Not thread-safe.

    checks: whether all ranks can check their weights.
    name: the present name of the weights. At the start, it is the engine's `weights_version`.
    stopped: whether nothing may be loaded or saved.
    """

    def __init__(self, ranks: int = 1, *, checks: bool = False, name: str = "", slots: int = 1) -> None:
        """`ranks`: the number of ranks. `slots`: the number of slots of the host pool. `checks` and `name` are the
        attributes of these names."""
        self.checks = checks
        self.name = self.first_name = name
        self.stopped = False
        self._ranks = ranks
        self._most_waiting = max(1, int(slots * CHECKS_WAITING_SHARE))
        self._asked = 0
        self._asked_now = False  # whether the present plan has a check
        self._asked_at = -math.inf
        self._wanted = False  # whether the next plan must have a check
        self._answers: Counter[int] = Counter()  # for each check, the number of ranks that agree
        self._agreed = 0
        self._told = 0  # up to this check, the ranks know that all agree
        self._waiting = 0  # the number of blocks that wait for a check
        self._names: dict[int, str] = {}  # the name that each rank was given
        self._costs: deque[float] = deque(maxlen=5)
        self._asked_times: dict[int, float] = {}  # for checks in which not all ranks have agreed yet
        self._fresh_at = -math.inf  # when the newest agreed check was requested
        self._stopped_at = 0  # the last check that had been requested when sharing stopped

    @property
    def covering(self) -> int:
        """The number of the check that covers the step of the present plan, or 0 if there are no checks."""
        return self._asked + (not self._asked_now) if self.checks else 0

    @property
    def agreed(self) -> int:
        """The number of the newest check up to which all ranks agree."""
        return self._agreed

    @property
    def is_named_in_part(self) -> bool:
        """Whether some ranks were given a new name that the others were not given."""
        names = list(self._names.values())  # a copy, because other threads read this property, too
        return bool(names) and (len(names) < self._ranks or len(set(names)) > 1)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for a check, so that an engine without requests should continue to make steps."""
        answered = self._told >= self._asked or (self._ranks == 1 and self._agreed >= self._asked)
        if not self._waiting and answered:
            return False
        return not self._waiting_in_vain

    @property
    def _waiting_in_vain(self) -> bool:
        unanswered = self._agreed < self._asked and time.monotonic() - self._asked_at > CHECK_ANSWER_S
        return self.stands_still or unanswered

    @property
    def stands_still(self) -> bool:
        """Whether nothing may be loaded or saved now."""
        return self.stopped or self.is_named_in_part

    def is_unheard(self, since: float) -> bool:
        """Return whether the ranks have not yet answered a check that was requested after `since`, a time of
        `time.monotonic`. If no such check was requested yet, the next step makes one. Return False if the ranks do not
        answer for too long."""
        now = time.monotonic()
        if not self.checks or self.stands_still or self._fresh_at >= since or now - since > CHECK_ANSWER_S:
            return False
        self._wanted |= self._asked_at < since
        return True

    @property
    def _pause_s(self) -> float:
        return max(LEAST_PAUSE_S, statistics.median(self._costs or [0.0]) / CHECKS_SHARE)

    def ask(self) -> int:
        """Request a check in the present plan. Return its number, or 0 if there are no checks."""
        if self.checks and not self._asked_now:
            self._asked += 1
            self._asked_now = True
            self._asked_at = self._asked_times[self._asked] = time.monotonic()
        return self.covering

    def plan(self, plan: StepPlan, *, hurries: bool) -> None:
        """Complete a plan with its check, if one is due. `hurries`: whether another engine waits for blocks that the
        plan saves."""
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
        """Process a report of the ranks. Afterwards, call `new_name`, `has_changed` and `is_restored`."""
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
        """If all ranks were given the same new name, return it, and None in later calls. From now on, the weights have
        this name, and sharing resumes."""
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
        """Return whether this report is the first to say that a rank's weights have changed. If so, stop sharing."""
        if self.stopped or not report.changed:
            return False
        self.stop()
        return True

    def is_restored(self) -> bool:
        """Return whether all ranks agree in a check that was requested after sharing stopped. If so, resume sharing."""
        if not self.stopped or not self.checks or self._agreed <= self._stopped_at:
            return False
        self.stopped = False
        self.distrust()
        return True

    def stop(self) -> None:
        """Stop all loads and saves from now on."""
        self.stopped = True
        self._stopped_at = self._asked
        self.distrust()

    def distrust(self) -> None:
        """Ignore all earlier checks from now on."""
        self._waiting = 0
        self._wanted = True
        self._fresh_at = -math.inf
        self._asked_times.clear()


def salt_name(sharing: SharingChecks) -> str:
    """Return the name of the weights for the keys. It is empty while the engine has the weights of its start, because
    the namespace names those weights."""
    return "" if sharing.name == sharing.first_name else sharing.name
