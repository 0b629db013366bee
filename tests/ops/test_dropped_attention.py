"""Attention with dropout as one operator: for what calls there is a kernel, and what it gives by shapes alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import InputError
from fxpar.ops import sdpa
from fxpar.ops.counter import IndexCut
from fxpar.ops.dropped_attention import places

ONE = torch.tensor(1)
ROWS, HEADS = IndexCut(0, 1, 1, 4, torch.tensor(3)), IndexCut(1, 1, 1, 2, ONE)


def heads(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def drops(p: float = 0.1, cuts: tuple[IndexCut, ...] = ()) -> sdpa.Drops:
    return sdpa.Drops(torch.tensor([5, 1, 0], device="meta"), p, 77, cuts)


def test_heads_of_all_ranks_are_counted() -> None:
    x = heads(6, 3, 8, 16)
    found = places(x, x, x, 0.1, (ROWS, HEADS))
    assert found is not None
    assert (found.heads, found.rows_before, found.heads_before) == (6, torch.tensor(18), torch.tensor(3))


def test_rows_of_other_ranks_may_be_other_numbers() -> None:
    x = heads(6, 3, 8, 16)
    found = places(x, x, x, 0.1, (IndexCut(0, 1, 6, torch.tensor(11), torch.tensor(5)),))
    assert found is not None
    assert (found.heads, found.rows_before, found.heads_before) == (3, torch.tensor(5), None)


OTHERS: dict[str, Any] = {
    "another type": {"x": heads(2, 3, 8, 16, dtype=torch.float32)},
    "a CPU": {"x": heads(2, 3, 8, 16, device="cpu")},
    "three dimensions": {"x": heads(3, 8, 16)},
    "wide heads": {"x": heads(2, 3, 8, 257)},
    "all dropped": {"p": 1.0},
    "queries are cut": {"cuts": (IndexCut(2, 1, 1, 2, ONE),)},
    "heads are cut in several runs": {"cuts": (IndexCut(1, 3, 1, 2, ONE),)},
    "rows are cut twice": {"cuts": (ROWS, ROWS)},
    "heads are cut twice": {"cuts": (HEADS, HEADS)},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_have_the_plain_form(other: str) -> None:
    given = {"x": heads(2, 3, 8, 16), "p": 0.1, "cuts": (), **OTHERS[other]}
    assert places(given["x"], given["x"], given["x"], given["p"], given["cuts"]) is None


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = heads(2, 3, 8, 16, device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="Triton is not installed") as caught:
        places(x, x, x, 0.1, ())
    assert caught.value.where == "attention"


@pytest.mark.parametrize("lacking", range(3))
def test_heads_that_are_broadcast_have_the_plain_form(lacking: int) -> None:
    query, key, value = (heads(2, 1 if i == lacking else 4, 8, 16) for i in range(3))
    assert places(query, key, value, 0.1, ()) is None


def test_no_probabilities_are_in_memory() -> None:
    query, key, value = heads(2, 8, 32, 16), heads(2, 8, 48, 16), heads(2, 8, 48, 24)
    biggest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal biggest
            found = func(*args, **(kwargs or {}))
            for each in found if isinstance(found, tuple) else (found,):
                biggest = max(biggest, each.numel())
            return found

    with Watch():  # type: ignore[no-untyped-call]
        call = sdpa.SdpaCall(query, key, value, is_causal=True)
        out, log_sum = sdpa.forward(call, drops())
        found = sdpa.backward(call, out, out, log_sum, drops())
    assert biggest == max(x.numel() for x in (query, key, value, out)) < 2 * 8 * 32 * 48
    assert (out.shape, log_sum.shape, log_sum.dtype) == ((2, 8, 32, 24), (2, 8, 32), torch.float32)
    assert [x.shape for x in found] == [query.shape, key.shape, value.shape]
    # In memory heads are columns, as the next product wants them.
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *found))


def test_heads_that_share_keys_get_a_gradient_each_of_which_the_sum_is_the_keys() -> None:
    query, key = heads(2, 8, 32, 16), heads(2, 2, 32, 16)
    call = sdpa.SdpaCall(query, key, key, is_causal=True, enable_gqa=True)
    out, log_sum = sdpa.forward(call, drops())
    found = sdpa.backward(call, out, out, log_sum, drops())
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]


def test_a_forward_and_its_backward_have_one_draw() -> None:
    def step(query: Tensor, key: Tensor, rng: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        own = sdpa.Drops(rng, 0.1, 77, (IndexCut(0, 1, 1, 4, rng[2]),))
        call = sdpa.SdpaCall(query, key, key, is_causal=True)
        out, log_sum = sdpa.forward(call, own)
        return out, *sdpa.backward(call, gradient, out, log_sum, own)

    with FakeTensorMode():
        given = (heads(2, 8, 32, 16), heads(2, 8, 48, 16), torch.empty(3, dtype=torch.int64, device="meta"))
        graph = make_fx(step)(*given, heads(2, 8, 32, 16)).graph
    names = [str(node.target) for node in fx_graph_cse(graph).nodes]
    assert names.count("fxpar.drawn_probabilities.default") == 1
