"""The walk of the eager model has the engine pass the backward, and torch's own nodes compute nothing in it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.capture import eager
from fxpar.capture.eager import walk
from fxpar.errors import CaptureError
from tests.capture.models import Net, example, net


class Operators(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def attended(m: Net, x: Tensor) -> Any:
    h = m.up(x).unsqueeze(1)
    return (m.down(nn.functional.scaled_dot_product_attention(h, h, h).squeeze(1)) * 2).sum()


def test_torchs_own_nodes_compute_nothing_in_a_walk() -> None:
    aten, original, operators = torch.ops.aten, eager._passed, Operators()

    def passed(*args: Any) -> bool:
        with operators:
            return original(*args)

    with mock.patch.object(eager, "_passed", passed):
        assert walk(net(attended), example(), None).reason == ""
    assert operators.seen  # of the attention
    assert not {aten.mm.default, aten.mul.Tensor, aten.sum.dim_IntList} & {*operators.seen}


def test_a_hook_behind_an_attention_is_found() -> None:
    def hooked(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        list(map(h.grad_fn.register_hook, [lambda before, after: None]))
        return m.down(nn.functional.scaled_dot_product_attention(h, h, h)).sum()

    with pytest.raises(CaptureError, match="a hook"):
        walk(net(hooked), example(), None)
