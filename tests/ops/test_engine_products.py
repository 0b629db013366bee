"""Products of experts' rows by Transformer Engine are those of torch: of a stand-in on CPUs, of itself on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.errors import InputError, PlanError
from fxpar.ops.engine_products import check_engine, check_type, engine_linear, engine_outer
from fxpar.plan.plan import Plan
from fxpar.program.program import Note, TensorType, set_note
from tests.ops.grouped_gemm import stand_in
from tests.passes.experts import compared, dispatched

ENGINE = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
EXPERTS, ROWS, IN, OUT = 4, 24, 16, 32

# Rows of each expert of each group, of 24: all, none of some, one's, none at all, and some that are nobody's.
COUNTS: dict[str, list[list[int]]] = {
    "all": [[5, 7, 4, 8]],
    "gaps": [[0, 13, 0, 11]],
    "one": [[0, 0, 24, 0]],
    "none": [[0, 0, 0, 0]],
    "behind": [[3, 0, 8, 2]],
    "groups": [[5, 0, 4, 8], [0, 0, 0, 9], [6, 6, 6, 6]],
}


def operands(counts: list[list[int]], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Rows, what they give, and the counts; what is nobody's is no number."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(len(counts), ROWS, size, generator=generator, dtype=torch.float64) for size in (IN, OUT))
    for g, own in enumerate(counts):
        x[g, sum(own) :] = y[g, sum(own) :] = torch.nan
    return x.to(device, dtype), y.to(device, dtype), torch.tensor(counts)


def matrices(dtype: torch.dtype, transposed: bool, stands: str, device: str = "cpu") -> Tensor:
    """Of each expert, shared by all groups: [4, 32, 16], or [4, 16, 32]."""
    size = (EXPERTS, IN, OUT) if transposed else (EXPERTS, OUT, IN)
    found = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device, dtype)
    if stands == "by column":
        return found.mT.contiguous().mT
    return found.repeat(1, 1, 2)[..., : size[-1]] if stands == "apart" else found


def exactly(x: Tensor) -> Tensor:
    """The same numbers on a CPU in float64."""
    return x.detach().to("cpu", torch.float64)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Within a part of the largest."""
    assert found.shape == wanted.shape
    assert (exactly(found) - wanted).abs().max() <= tolerance * max(float(wanted.abs().max()), 1.0)


def check_product(counts: list[list[int]], transposed: bool, stands: str, dtype: torch.dtype, on: str) -> None:
    """A product and both gradients against the loop over experts."""
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-9}[dtype]
    (x, y, splits), weight = operands(counts, dtype, on), matrices(dtype, transposed, stands, on)
    fxp: Any = torch.ops.fxpar
    wanted = fxp.grouped_linear(exactly(x), exactly(weight), splits, transposed)
    close(engine_linear(x, weight, splits, transposed), wanted, tolerance)
    wanted = fxp.grouped_linear(exactly(y), exactly(weight), splits, not transposed)
    close(engine_linear(y, weight, splits, not transposed), wanted, tolerance)
    pair = (x, y) if transposed else (y, x)
    wanted = fxp.grouped_outer(*map(exactly, pair), splits, 0)
    close(engine_outer(*pair, splits, 0), wanted, tolerance)
    assert wanted.shape == weight.shape


@pytest.fixture
def seen() -> Iterator[list[list[int]]]:
    with stand_in() as calls:
        yield calls


@pytest.mark.parametrize("stands", ["by row", "by column", "apart"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_and_gradients_are_the_loop_s(
    seen: list[list[int]], counts: list[list[int]], transposed: bool, stands: str
) -> None:
    check_product(counts, transposed, stands, torch.float64, "cpu")
    assert seen == [[rows for rows in own if rows] for own in counts if any(own)] * 3


def test_no_rows_at_all(seen: list[list[int]]) -> None:
    x, counts = torch.zeros(1, 1, 0, IN), torch.zeros(1, 1, EXPERTS, dtype=torch.int64)
    weight = torch.ones(1, EXPERTS, OUT, IN)
    assert engine_linear(x, weight, counts, False).shape == (1, 1, 0, OUT)
    found = engine_outer(x, x, counts, 1)
    assert found.shape == (1, EXPERTS, IN, IN)
    assert not found.any()
    assert not seen


PLAN = Plan(dp=2, ep=2, dispatch="exact", grouped_gemm="transformer_engine")


@pytest.mark.parametrize("routing", ["learned", "one", "some", "ties"])
def test_a_step_is_the_single_device_s(seen: list[list[int]], routing: str) -> None:
    """Every product of experts and its gradients by the stand-in, on simulated ranks."""
    report = compared(dispatched(PLAN, routing), routing)
    assert report.ok, report
    assert report.gradients == 9
    # A layer has two products, each of which has two gradients. By two of the routings one rank has all rows.
    assert len(seen) == 6 * (1 if routing in ("one", "ties") else 2)


@pytest.mark.parametrize(("dtype", "reason"), [(torch.float64, "no torch.float64"), (torch.float32, "in TF32")])
def test_types_that_it_multiplies_otherwise_are_refused(dtype: torch.dtype, reason: str) -> None:
    graph = torch.fx.Graph()
    node = set_note(graph.placeholder("y"), Note(type=TensorType(dtype, (4, 8))))
    with pytest.raises(PlanError, match=reason) as found:
        check_type(node)
    assert found.value.remedy.endswith("grouped_gemm='torch'")


def test_float32_may_be_multiplied_in_tf32() -> None:
    node = set_note(torch.fx.Graph().placeholder("y"), Note(type=TensorType(torch.float32, (4, 8))))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_type(node)
    finally:
        torch.set_float32_matmul_precision(before)


def test_without_a_gpu_a_program_is_checked_by_torch_s() -> None:
    report = compared(dispatched(PLAN))
    assert report.ok, report


def test_a_device_that_is_no_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="multiplies on GPUs, and the ranks run on cpu") as found:
        check_engine(torch.device("cpu"))
    assert found.value.remedy == "set grouped_gemm='torch'"


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is there")
def test_where_it_is_not_installed_it_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be imported") as found:
        check_engine(torch.device("cuda"))
    assert "pip install fxpar[te]" in found.value.remedy


@pytest.mark.gpu
@ENGINE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stands", ["by row", "by column"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_on_a_gpu_products_and_gradients_are_the_loop_s(
    counts: list[list[int]], transposed: bool, stands: str, dtype: torch.dtype
) -> None:
    """Within the rounding of the type; float32 is multiplied in TF32."""
    check_product(counts, transposed, stands, dtype, "cuda")
