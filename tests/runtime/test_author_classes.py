"""Modules of unusual classes become parts of a parallel model, or are refused by name; nothing of the author's runs."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import InputError
from fxpar.runtime.local_model import attach, seal
from fxpar.runtime.parameters import Elsewhere, class_of, original_of
from fxpar.runtime.refusals import Root, Submodule

CPU = torch.device("cpu")


class Kind(abc.ABCMeta):
    """A metaclass that notes what it makes and what it is called for."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, namespace: Any) -> Any:
        Kind.made.append(name)
        return super().__new__(cls, name, bases, namespace)


class Layer(nn.Module, metaclass=Kind):
    """Has two names for one module, a list of it, a method of its own in an attribute, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.again, self.several, self.me = self.up, [self.up], self.helper
        self.weights = [self.up.weight]
        self._rate = 0.5
        self.register_forward_hook(lambda module, args, output: output * 2)

    def helper(self) -> int:
        return 3

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value


def attached(model: nn.Module) -> Any:
    """A root that has the modules of a model, and its tensors as they are."""
    root: Any = Root()
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    seal(root, attach(root, model, tensors, CPU), CPU)
    return root


def test_a_class_stands_for_the_author_s_and_makes_modules_of_it() -> None:
    made: Any = class_of(Submodule, nn.Linear)
    assert original_of(made) is nn.Linear
    assert made == nn.Linear
    assert nn.Linear == made
    assert made != nn.LayerNorm
    assert {nn.Linear: 1}[made] == 1
    assert made in (nn.LayerNorm, nn.Linear)
    assert made.__name__ == "Linear"
    assert type(made(2, 3)) is nn.Linear


def test_metaclasses_do_not_see_it_and_references_stay_in_the_model() -> None:
    before = list(Kind.made)
    model = Layer()
    root: Any = attached(model)
    assert Kind.made == before
    assert issubclass(type(root), Layer)
    assert type(model) is Layer
    assert root.again is root.up is root.several[0]
    assert root.me() == 3
    assert vars(root)["me"].__self__ is root
    assert root.weights[0] is root.up.weight is model.up.weight
    assert not root._forward_hooks
    assert model._forward_hooks


def test_a_setter_s_write_is_judged_and_a_name_of_ours_is_refused() -> None:
    root = attached(Layer())
    root.rate = 0.5
    with pytest.raises(InputError, match="_rate = …"):
        root.rate = 1.0

    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generate = nn.Linear(2, 2)

    with pytest.raises(InputError, match="the name is taken by ParallelModule"):
        attached(Taken())


def test_classes_that_cannot_be_parts_are_refused() -> None:
    class Shared(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Shared:
            return self

    class Slots(nn.Module):
        __slots__ = ("rate",)

    with pytest.raises(InputError, match="copies itself as itself"):
        attached(nn.Sequential(Shared(2, 2)))
    with pytest.raises(InputError, match="leave __slots__"):
        attached(Slots())


def test_a_parameter_of_another_rank_has_a_shape_and_no_values() -> None:
    like = nn.Parameter(torch.empty(2, 3, device="meta"))
    p: Any = Elsewhere(like, "layer.weight", CPU)
    assert isinstance(p, nn.Parameter)
    assert type(p) == nn.Parameter  # noqa: E721 - as torch's optimizers ask
    assert p.shape == torch.Size([2, 3])
    assert isinstance(p.shape, torch.Size)
    assert (p.numel(), p.device, p.is_meta, p.type()) == (6, CPU, False, "torch.FloatTensor")
    with torch.no_grad():
        assert p.mul_(torch.ones(2, 3)) is not None
        nn.init.zeros_(p)
        p.data.copy_(torch.ones(2, 3))
    reads = (
        lambda: p.sum().item(),
        p.tolist,
        lambda: p.detach().numpy(),
        lambda: torch.equal(p, torch.ones(2, 3)),
        lambda: nn.functional.linear(torch.ones(1, 3), p),
        lambda: torch.ones(2, 3).add_(p),
        lambda: bool(p.isfinite().all()),
        p.cpu,
    )
    for read in reads:
        with pytest.raises(InputError, match="values that other ranks of the pipeline hold"):
            read()
    with pytest.raises(InputError, match="would draw numbers"):
        nn.init.normal_(p)


def test_a_module_made_here_is_no_part_of_a_model_that_is_split_again() -> None:
    root = attached(nn.Sequential(nn.Linear(2, 2)))

    def call(x: Tensor) -> Any:
        return fxpar.parallelize(nn.Sequential(*root[:1]), fxpar.Plan(), (x,))

    with pytest.raises(InputError, match="parallelised already"):
        call(torch.zeros(2, 2))
