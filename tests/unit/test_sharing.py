"""When an engine checks its weights, and what it concludes from its ranks' reports. Without vLLM."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore_client.engine.paged import sharing as module
from kvstore_client.engine.paged.plan import SavedBlock, Saves, StepPlan, WorkerReport
from kvstore_client.engine.paged.sharing import CHECK_ANSWER_S, CHECKS_SHARE, LEAST_PAUSE_S, SharingChecks, salt_name
from tests.support.standing_clock import StandingClock

SLOTS = 80  # an eighth of them may wait: ten blocks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, module)


def step(
    sharing: SharingChecks, blocks: int = 0, *, hurries: bool = False, idle: bool = False, loads: bool = False
) -> StepPlan:
    """Plan a step that saves this many blocks. As in the engine, loads and saves are planned before the step."""
    plan = StepPlan(idle=idle)
    if loads:
        sharing.ask()
    if blocks:
        keys = [bytes([number]) for number in range(blocks)]
        plan.saves = Saves(0, [SavedBlock(key, at, at) for at, key in enumerate(keys)])
        plan.saves.check = sharing.covering
    sharing.plan(plan, hurries=hurries)
    return plan


def agree(sharing: SharingChecks, *checks: int, ranks: int = 1, cost_s: float = 0.0) -> WorkerReport:
    report = WorkerReport(agreed=Counter(dict.fromkeys(checks, ranks)), check_seconds=cost_s)
    sharing.take(report)
    return report


def checked(ranks: int = 1) -> SharingChecks:
    """Return checks after a first one on which all ranks agreed."""
    sharing = SharingChecks(ranks, checks=True, slots=SLOTS)
    agree(sharing, step(sharing, 1).check, ranks=ranks)
    return sharing


def test_without_weight_checks_nothing_waits_for_one(clock: StandingClock) -> None:
    sharing = SharingChecks(2, name="v1")
    plan = step(sharing, 5)
    assert (plan.check, plan.covering, plan.weights) == (0, 0, "v1")
    assert plan.saves is not None and plan.saves.check == 0
    assert not sharing.waits and not sharing.is_unheard(clock.now)


def test_a_steps_saves_are_covered_by_the_next_check_only(clock: StandingClock) -> None:
    sharing = checked()
    plans = [step(sharing, 1) for _ in range(3)]
    assert [plan.check for plan in plans] == [0, 0, 0]
    clock.now += LEAST_PAUSE_S + 0.01
    last = step(sharing, 1)
    assert last.check
    for plan in (*plans, last):
        assert plan.saves is not None and plan.saves.check == plan.covering == last.check
    after = step(sharing, 1)
    assert after.saves is not None and after.saves.check == last.check + 1


@pytest.mark.parametrize("how", [{"hurries": True}, {"idle": True}, {"loads": True}])
def test_a_load_a_waiter_or_an_idle_engine_checks_at_once(clock: StandingClock, how: dict[str, bool]) -> None:
    sharing = checked()
    assert not step(sharing, 1).check
    plan = step(sharing, 1, **how)
    assert plan.check and plan.saves is not None and plan.saves.check == plan.check
    assert not step(sharing).check, "nothing waits for another one"


def test_at_most_an_eighth_of_the_slots_waits_for_checks(clock: StandingClock) -> None:
    sharing = checked()
    waiting, most = 0, 0
    for _ in range(100):
        waiting = 0 if step(sharing, 3).check else waiting + 3
        most = max(most, waiting)
    assert 0 < most <= SLOTS // 8


def test_unneeded_checks_take_at_most_their_share_of_time(clock: StandingClock) -> None:
    """The checks stay within their share of the time, whatever a check costs. Here, steps of 5 ms save blocks for a
    minute."""
    for cost_s in (0.00001, 0.0003, 0.004):
        sharing = SharingChecks(checks=True, slots=1 << 20)
        began, spent = clock.now, 0.0
        while clock.now < began + 60:
            clock.now += 0.005
            if check := step(sharing, 1).check:
                clock.now += cost_s
                spent += cost_s
                agree(sharing, check, cost_s=cost_s)
        assert spent <= 2 * cost_s + CHECKS_SHARE * (clock.now - began), cost_s
        assert spent, "and they are made"


def test_all_ranks_must_agree_in_any_order(clock: StandingClock) -> None:
    sharing = SharingChecks(3, checks=True, slots=SLOTS)
    first, second = step(sharing, 1, hurries=True).check, step(sharing, 1, hurries=True).check
    agree(sharing, first, second, ranks=2)
    assert sharing.agreed == 0
    agree(sharing, second)
    assert sharing.agreed == second, "a later check vouches for what was before"
    agree(sharing, first)
    assert sharing.agreed == second
    assert step(sharing).agreed == second, "the next plan tells the ranks"


def test_an_idle_engine_steps_until_all_ranks_answer_or_time_out(
    clock: StandingClock,
) -> None:
    sharing = checked(ranks=2)
    step(sharing)
    assert not sharing.waits
    step(sharing, 1)
    assert sharing.waits
    check = step(sharing, idle=True).check
    assert check and sharing.waits, "no rank has answered"
    agree(sharing, check, ranks=2)
    assert sharing.waits, "the ranks have not heard of each other"
    step(sharing, idle=True)
    assert not sharing.waits
    step(sharing, 1, idle=True)
    clock.now += CHECK_ANSWER_S + 0.01
    assert not sharing.waits


def test_sharing_stops_with_the_first_rank_whose_weights_differ(clock: StandingClock) -> None:
    sharing = checked(ranks=2)
    check = step(sharing, 1, hurries=True).check
    report = WorkerReport(agreed=Counter({check: 1}), changed={check})
    sharing.take(report)
    assert sharing.has_changed(report) and sharing.stopped and sharing.stands_still
    assert not sharing.has_changed(report), "said once"
    assert sharing.agreed < check


def test_sharing_resumes_only_after_a_check_begun_after_it_stopped(clock: StandingClock) -> None:
    sharing = checked()
    early, late = (step(sharing, 1, hurries=True).check for _ in range(2))
    report = WorkerReport(changed={early})
    sharing.take(report)
    assert sharing.has_changed(report)
    agree(sharing, late)
    assert not sharing.is_restored(), "asked for before"
    again = step(sharing).check
    assert again, "it looks in the next step"
    agree(sharing, again)
    assert sharing.is_restored() and not sharing.stopped


def test_a_new_name_counts_once_all_ranks_have_the_same(clock: StandingClock) -> None:
    sharing = checked(ranks=2)
    sharing.stop()
    sharing.take(WorkerReport(names={0: "step-1"}))
    assert sharing.is_named_in_part and sharing.stands_still and sharing.new_name() is None
    sharing.take(WorkerReport(names={1: "step-2"}))
    assert sharing.is_named_in_part and sharing.new_name() is None, "they were told different names"
    sharing.take(WorkerReport(names={0: "step-2"}))
    assert sharing.new_name() == "step-2" and sharing.new_name() is None
    assert not sharing.stands_still and salt_name(sharing) == "step-2"
    plan = step(sharing)
    assert plan.weights == "step-2" and plan.check, "what was checked before says nothing"


def test_the_initial_name_adds_nothing_to_keys() -> None:
    sharing = SharingChecks(checks=True, name="v1")
    assert salt_name(sharing) == ""
    for name, salt in (("v2", "v2"), ("v1", "")):
        sharing.take(WorkerReport(names={0: name}))
        assert sharing.new_name() == name and salt_name(sharing) == salt


def test_pending_conclusions_wait_for_a_newer_check(clock: StandingClock) -> None:
    sharing = checked()
    asked_at = clock.now
    clock.now += 0.01
    assert sharing.is_unheard(clock.now - 0.005) and not sharing.is_unheard(asked_at)
    since = clock.now - 0.005
    check = step(sharing).check
    assert check, "the next step has one"
    agree(sharing, check)
    assert not sharing.is_unheard(since)
    clock.now += CHECK_ANSWER_S + 0.02
    assert not sharing.is_unheard(since + 0.02), "ranks that do not answer are waited for no longer"


def test_after_a_reset_no_earlier_check_counts(clock: StandingClock) -> None:
    sharing = checked()
    before = clock.now
    assert not sharing.is_unheard(before)
    sharing.distrust()
    assert sharing.is_unheard(before)
    assert step(sharing).check
