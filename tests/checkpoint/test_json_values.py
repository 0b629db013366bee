"""What schedulers hold comes back from JSON as it was; what cannot is refused with its place."""

import json
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from fxpar.checkpoint.optimizer_state import decode, document, encode
from fxpar.errors import CheckpointError

VALUES: list[Any] = [
    None,
    True,
    0,
    2**70,
    -1.5e-300,
    "tuple",
    [],
    (),
    {},
    [1, (2, [3.0, {"a": (None,)}])],
    {"tuple": [1]},
    {"items": 3},
    {"scalar": {"float": "x"}},
    {3: "x", (1, 2): "y", "3": "z"},
    {"float": math.inf},
    -math.inf,
    Counter({30: 1, 60: 2}),
    Counter(),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = decode(json.loads(document(encode(value, "x"))))
    assert found == value
    assert type(found) is type(value)


def test_numbers_that_are_tensors_and_nan_come_back() -> None:
    found = decode(json.loads(document(encode([torch.tensor(0.1), torch.tensor(3), math.nan], "x"))))
    assert [(v.dtype, v.item()) for v in found[:2]] == [(torch.float32, torch.tensor(0.1).item()), (torch.int64, 3)]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, len]}, "x['a'][1]"),
        ((torch.zeros(2),), "x[0]"),
        ({"a": defaultdict(int)}, "x['a']"),
        (object(), "x"),
        ({1, 2}, "x"),
        ({len: 1}, "x: a key"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode(value, "x")
    assert caught.value.where == where


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=30),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 2, 5]),
    "function": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=3), schedules.ExponentialLR(o, 0.5)], [3]
    ),
    "chain": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.PolynomialLR(o, 9)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name: str) -> None:
    first = optimizer()
    schedule = SCHEDULES[name](first)

    def step(one: torch.optim.Optimizer, other: Any) -> float:
        one.step()
        other.step()
        return float(one.param_groups[0]["lr"])

    for _ in range(4):
        step(first, schedule)
    second = optimizer()
    other = SCHEDULES[name](second)
    other.load_state_dict(decode(json.loads(document(encode(schedule.state_dict(), "scheduler")))))
    second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
    assert [step(first, schedule) for _ in range(6)] == [step(second, other) for _ in range(6)]


def test_a_plateau_goes_on() -> None:
    schedule = schedules.ReduceLROnPlateau(optimizer(), patience=1)
    again = schedules.ReduceLROnPlateau(optimizer(), patience=1)
    again.load_state_dict(decode(json.loads(document(encode(schedule.state_dict(), "scheduler")))))
    assert again.best == math.inf
