"""Copies of layers are proven by what the layers do where the eager model runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.capture.test_layer_trace_cache import Layer, copied


def test_what_only_runs_can_tell_apart_is_traced() -> None:
    """What no look at attributes and names finds: it is seen in what the layers do."""

    def hidden(m: Layer, x: Tensor) -> Any:
        factor: int = 1 + object.__getattribute__(m, "index")
        return m.mlp(x) * factor

    assert copied(hidden) == 0

    def counting(m: Layer, x: Tensor, box: list[int] = []) -> Any:  # noqa: B006
        box[:] = [len(box) and (box[0] + 1) % 5]
        return m.mlp(x) * (1 + box[0])

    assert copied(counting) == 0


def test_outputs_that_their_caller_changes_or_that_are_parts() -> None:
    def filled(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x).pop("x")
        return x

    def twice(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x, one, other = layer(x)
            one["number"] = 2
            x = x * (1 + len(other))
        return x

    def same_container(m: Layer, x: Tensor) -> Any:
        container: dict[str, int] = {}
        return m.mlp(x), container, container

    assert copied(same_container, run=twice) == 0
    assert copied(lambda m, x: {"x": m.mlp(x)}, run=filled) == 4
    assert copied(lambda m, x: torch.cat([m.mlp(x), x], -1)[..., 4:]) == 0
    assert copied(lambda m, x: m.mlp(x).reshape(x.shape[0], x.shape[1], -1)) == 0
