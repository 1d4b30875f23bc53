"""Fingerprints of weights, and what a rank concludes from them. Without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvstore_client.engine.paged.plan import Load, Saves, StepPlan  # noqa: E402
from kvstore_client.engine.paged.weights import (  # noqa: E402
    AsleepError,
    Fingerprints,
    WeightsWatch,
    diagonal,
)
from kvstore_client.vllm import new_weights  # noqa: E402


class Odd(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model with parameters of every kind: views, several types, one element, no element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Linear(700, 300, dtype=torch.bfloat16)
        self.turned = torch.nn.Parameter(torch.randn(64, 200).t())
        self.packed = torch.nn.Parameter(torch.randint(0, 99, (33, 5), dtype=torch.int32), requires_grad=False)
        self.small = torch.nn.Parameter(torch.randn(40, 40).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.experts = torch.nn.Parameter(torch.randn(6, 30, 20))
        self.complex = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mean", torch.randn(50))
        self.register_buffer("scratch", torch.zeros(50), persistent=False)


def taken(prints: Fingerprints) -> bytes:
    return prints.take().value()


@pytest.mark.parametrize(
    "name", ["wide.weight", "wide.bias", "turned", "packed", "small", "scale", "experts", "complex", "mean"]
)
def test_a_change_of_any_tensor_is_noticed(name: str) -> None:
    model = Odd()
    prints = Fingerprints(lambda: [model])
    before = taken(prints)
    assert taken(prints) == before
    tensor = model.get_parameter(name) if name != "mean" else model.mean
    old = tensor.detach().clone()
    tensor.data.copy_((old.float() * 1.5 + 1).to(old.dtype) if not old.is_complex() else old + 1)
    assert taken(prints) != before
    tensor.data.copy_(old)
    assert taken(prints) == before
    tensor.data = old + 0 if old.dtype is not torch.float8_e4m3fn else old.clone()
    assert taken(prints) == before, "the same values in another place"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "wide", torch.nn.Linear(700, 300, dtype=torch.bfloat16)),
        lambda model: setattr(model.wide, "weight", torch.nn.Parameter(torch.zeros(300, 700, dtype=torch.bfloat16))),
        lambda model: setattr(model.wide.weight, "data", torch.zeros(300, 700, dtype=torch.bfloat16)),
    ],
    ids=["a module", "a parameter", "its memory"],
)
def test_a_replaced_tensor_is_noticed(change: Callable[[Any], None]) -> None:
    model = Odd()
    prints = Fingerprints(lambda: [model])
    before = taken(prints)
    change(model)
    assert taken(prints) != before


def test_a_small_training_step_in_bfloat16_is_noticed() -> None:
    """Only a few elements change, because most steps are too small for bfloat16."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(40)))
    prints = Fingerprints(lambda: [model])
    before = taken(prints)
    generator = torch.Generator().manual_seed(1)
    for weights in model.parameters():
        step = 1e-6 * torch.randn(weights.shape, generator=generator).sign()
        weights.data.copy_((weights.float() + step).to(torch.bfloat16))
    assert taken(prints) != before


def test_changes_of_a_models_scratch_memory_are_ignored() -> None:
    model = Odd()
    prints = Fingerprints(lambda: [model])
    before = taken(prints)
    model.scratch.fill_(7)
    assert taken(prints) == before


def test_a_draft_model_counts() -> None:
    models = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    prints = Fingerprints(lambda: models)
    before = taken(prints)
    models[1].weight.data.add_(1)
    assert taken(prints) != before


def test_missing_memory_is_not_touched() -> None:
    def touched() -> list[Any]:
        raise AssertionError

    with pytest.raises(AsleepError):
        Fingerprints(touched, awake=lambda: False).take()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1000), (1000, 3), (7, 1, 90), (64, 64, 64)])
def test_sampled_elements_are_spread_over_a_tensor(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(max(1, torch.Size(shape).numel())).reshape(shape)
    for tensor in (numbers, numbers.permute(tuple(reversed(range(numbers.dim()))))):
        found = torch.cat(diagonal(tensor, 16)).tolist()
        assert len(set(found)) == len(found) == min(16, max(shape, default=1))
        if found[1:]:
            places = [
                torch.tensor([index // stride % size for index in found])
                for size, stride in zip(numbers.shape, numbers.stride(), strict=True)
            ]
            for size, side in zip(numbers.shape, places, strict=True):
                assert size < 16 or side.max() - side.min() >= 0.8 * (size - 1)


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.linear.weight.data.fill_(1.0)  # the effect of the change can be undone exactly

    def change(self, by: float = 1.0) -> None:
        self.linear.weight.data.add_(by)


def watch(model: Model, *, alone: bool = True) -> WeightsWatch:
    return WeightsWatch(Fingerprints(lambda: [model]), "", alone=alone)


def test_computed_blocks_are_sent_once_a_later_check_agrees() -> None:
    rank = watch(Model())
    assert rank.all_agree(1) is None
    rank.begin(StepPlan(check=1, covering=1, weights=""))
    assert rank.all_agree(1) is rank.mine_agree(1) is True
    assert rank.all_agree(2) is None
    report = rank.take_report()
    assert report is not None and report.agreed == [1]


def test_after_a_change_nothing_is_sent_or_used_until_weights_return() -> None:
    model = Model()
    rank = watch(model)
    rank.begin(StepPlan(check=1, covering=1, weights=""))
    model.change()
    rank.begin(StepPlan(check=2, covering=2, weights=""))
    report = rank.take_report()
    assert report is not None and (report.agreed, report.changed) == ([1], [2])
    assert rank.all_agree(2) is False and rank.mine_agree(1) is False, "a load may not have ended"
    model.change(-1.0)
    rank.begin(StepPlan(check=3, covering=3, weights=""))
    assert rank.all_agree(2) is False and rank.all_agree(3) is True


def test_one_of_several_ranks_waits_for_the_others() -> None:
    rank = watch(Model(), alone=False)
    rank.begin(StepPlan(check=1, covering=1, weights=""))
    assert rank.mine_agree(1) is True and rank.all_agree(1) is None
    rank.begin(StepPlan(agreed=1, covering=2, weights=""))
    assert rank.all_agree(1) is True


def test_a_plan_made_before_a_rename_is_void() -> None:
    model = Model()
    rank = watch(model)
    model.change()
    new_weights("step-1")
    plan = StepPlan(loads=[Load("request", check=1)], saves=Saves(0, check=1), check=1, covering=1, weights="")
    rank.begin(plan)
    assert plan.saves is not None
    assert rank.mine_agree(plan.loads[0].check) is rank.all_agree(plan.saves.check) is False
    report = rank.take_report()
    assert report is not None and report.name == "step-1" and not report.changed
    rank.begin(StepPlan(check=2, covering=2, weights="step-1"))
    assert rank.all_agree(2) is True


def test_a_name_belongs_to_one_kind_of_weights() -> None:
    model = Model()
    rank = watch(model)
    rank.rename("step-1")  # the name of the initial weights
    rank.rename("step-1")
    model.change()
    with pytest.raises(ValueError, match="expected a new name"):
        rank.rename("step-1")
    rank.rename("step-2")
    model.change(-1.0)
    rank.rename("step-1")
    with pytest.raises(ValueError, match="expected a name"):
        new_weights("")
