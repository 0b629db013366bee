"""What stands in for Transformer Engine's grouped GEMM where there is no GPU: the same, in torch.

It refuses what that refuses, and what that would compute wrongly: it reads no strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fxpar.ops import engine_products, transformer_engine

# A word for whether each operand is transposed, in a notation of columns: the right one stands in front here.
_LAYOUTS = ("TN", "NN", "NT")


def general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    accumulate: bool = False,
    single_output: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A product for each pair, into `out`, or into parts of its only tensor that follow each other."""
    assert layout in _LAYOUTS
    assert A
    assert len(A) == len(B) == len(quantization_params)
    assert all(each is None for each in quantization_params)
    assert m_splits is not None
    assert all(type(rows) is int for rows in m_splits)
    assert m_splits == [len(each) for each in B]
    assert all(type(values) is list for values in (A, B, out, m_splits))
    assert all(each.dim() == 2 and each.is_contiguous() and each.numel() for each in (*A, *B))
    assert all(each.dtype == out_dtype for each in (*A, *B, *out))
    assert not (accumulate and single_output)
    made = [(y.mT if layout[1] == "T" else y) @ (x.mT if layout[0] == "T" else x) for x, y in zip(A, B, strict=True)]
    if single_output:
        (whole,) = out
        assert layout != "NT"
        assert whole.is_contiguous()
        assert whole.shape == (sum(m_splits), made[0].shape[1])
        whole.copy_(torch.cat(made))
        return out, [], []
    for place, value in zip(out, made, strict=True):
        assert place.is_contiguous()
        assert place.shape == value.shape
        place.copy_(place + value if accumulate else value)
    return out, [], []


@contextmanager
def stand_in() -> Iterator[list[list[int]]]:
    """Has fxpar take this for Transformer Engine, on CPUs, in float64 too; notes the splits of each call."""
    seen: list[list[int]] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["m_splits"])
        return general_grouped_gemm(*args, **kwargs)

    def part(name: str, where: str, otherwise: str) -> Any:
        assert name == "pytorch.cpp_extensions"
        return SimpleNamespace(general_grouped_gemm=noted)

    with (
        mock.patch.object(transformer_engine, "part", part),
        mock.patch.object(transformer_engine, "check_device", return_value=None),
        mock.patch.object(engine_products, "_DEVICES", ("cpu",)),
        mock.patch.object(engine_products, "_TYPES", (*engine_products._TYPES, torch.float64)),
    ):
        yield seen
