"""What compiled steps send stays as it is until it is taken, however it lies, and is read where it was sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpar.ops import peer_copies
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.peer_memory.compiler.symmetric_buffer import SymmetricBuffer
from fxpar.plan.plan import Plan
from fxpar.runtime.inductor import Inductor
from tests.products import product

NAME, WHOLE = "pair", [(1, None)]


@dataclass(kw_only=True)
class Pair(SymmetricBuffer):
    """The end of a rank to whom the other sends numbers of 0.75; what is sent is looked at again when it is taken."""

    same: list[bool] = field(default_factory=list)
    _sends: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def _create(self, size: int) -> Sequence[Tensor]:
        return [torch.full((size,), 0x3F, dtype=torch.uint8) for _ in range(self.size)]

    def beside(self, buffer: int, sent: Tensor | Sequence[Tensor]) -> AbstractContextManager[None]:
        x = sent if isinstance(sent, Tensor) else sent[0]
        self._sends[buffer] = x, x.clone()
        return contextlib.nullcontext()

    def join(self, buffer: int) -> None:
        self.same.append(torch.equal(*self._sends.pop(buffer)))

    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """Nobody waits."""

    def wait(self, buffer: int, stage: int, senders: Sequence[int] = ()) -> None:
        """It is there."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(rank=0, size=2)
    symmetric_buffer.register(NAME, made)
    yield made
    symmetric_buffer.close([NAME])


def as_it_is(x: Tensor) -> Tensor:
    return x


def scaled(x: Tensor) -> Tensor:
    return x * 0.3 + x.relu()


def across(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def scaled_across(x: Tensor) -> Tensor:
    return scaled(x).transpose(1, 2)


Kind = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def total(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sent = peer_copies.start_sum(x, NAME, 1)
    beside = w @ w
    return peer_copies.summed(sent, NAME, 1).relu(), beside


def gather(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sent = peer_copies.start_gather(x, NAME, 1)
    beside = w @ w
    return peer_copies.gathered(sent, 0, WHOLE, NAME, 1), beside


def scatter(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sent = peer_copies.start_scatter(x, 2, WHOLE, 2, NAME, 1)
    beside = w @ w
    return peer_copies.scattered(sent, 2, WHOLE, NAME, 1), beside


def exchange(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sent = peer_copies.start_exchange(x, 2, WHOLE, 2, NAME, 1)
    beside = w @ w
    return peer_copies.exchanged(sent, 0, WHOLE, NAME, 1), beside


@product(
    kind=[total, gather, scatter, exchange],
    made=[as_it_is, scaled, across, scaled_across],
    dtype=[torch.float32, torch.bfloat16],
)
def test_what_is_sent_stays(pair: Pair, kind: Kind, made: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def step(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        return [*kind(made(a @ b), w)]

    shapes = [(4, 16, 16), (16, 16), (32, 32)]  # what is computed beside it is as large: its memory would do
    values = [torch.randn(shape, dtype=dtype) for shape in shapes]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(shape, dtype=dtype) for shape in shapes]
    with fresh_cache():
        run = Inductor(Plan()).alone(step, fakes, mode, backward=False)
    found, reference = run([*values]), step(*values)
    assert pair.same == [True, True]
    for own, other in zip(found, reference, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=1e-1)
