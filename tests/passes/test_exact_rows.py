"""dispatch_experts, exact: rows alone travel, as many as there are, and each layer's are told from another's."""

from __future__ import annotations

import itertools
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.compile import compile_program, lower_program
from fxpar.cost.capturable import capture_regions
from fxpar.cost.communication import collectives
from fxpar.errors import FxparError
from fxpar.experts.operators import permute, sent_rows
from fxpar.ir.program import has_note, note
from fxpar.manager import PassManager
from fxpar.ops.process_group import Group
from fxpar.passes.differentiate import differentiate
from fxpar.passes.mark_regions import mark_regions
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.models.test_experts import model
from tests.passes.experts import CHOICES, EXPERTS, ROWS, WIDTH, Routed, batch, check_text, dispatched, expert_plan
from tests.products import few

MODELS = (
    *("mixtral", "qwen3_moe,moe_intermediate_size=40", "gpt_oss", "gpt_oss,num_hidden_layers=1"),
    "deepseek_v3,first_k_dense_replace=1,moe_intermediate_size=40,n_routed_experts=8,n_group=4,topk_group=2",
)


plan = partial(expert_plan, dispatch="dropless")


# Every time ranks train a Mixtral so (tests/runtime/test_experts.py).
CASES = itertools.product(MODELS, ((2, 1, 1, 2), (2, 1, 2, 1)))


@pytest.mark.parametrize(("spec", "mesh"), few(CASES, []))
def test_models_are_the_single_device_s(spec: str, mesh: tuple[int, int, int, int]) -> None:
    built = model(spec)
    example = {name: torch.cat((value, value.roll(1, 0)))[:4] for name, value in built.batch.items()}
    found = expect(verify(built.model, example, plan(*mesh), loss=built.loss))
    assert found.split_flops > 0.9


def test_it_sends_what_a_balanced_load_needs() -> None:
    """Of twice as many places that the static one has."""
    found = [c for c in collectives(dispatched(plan(2, 1, 1, 2), length=6)) if c.phase == "forward"]
    sent = [(c.bytes, c.bytes_formula) for c in found if c.node in ("send_rows", "return_rows")]
    assert sent == [(ROWS * 6 * CHOICES * WIDTH * 8, f"{CHOICES * WIDTH * 8}*b*s")] * 2


def test_it_prints_and_parses() -> None:
    text = print_program(dispatched(plan(4, 1, 2, 2)))
    assert "counted r = 2*b*floor(s/2 + 1/2) like 24\n" in text
    assert re.search(r"fxpar\.send_rows\[dp-tp\]\(%\w+, %split_sizes\) : f64\[2, 2, r, 8\] dp:S\(0\) tp:S\(1\)", text)
    assert print_program(parse_program(text)) == text


class Two(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Routed(), Routed()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Both [b, s]."""
        return self.first(ids, labels) + self.second(ids, labels)  # type: ignore[no-any-return]


def two_layers() -> str:
    torch.manual_seed(0)
    captured = capture(Two().double(), batch(5), plan(2, 1, 1, 2))
    return print_program(compile_program(captured.program))


def test_mutants_are_rejected_statically() -> None:
    """Rows of one layer in another, another length of an order, an exchange left out, equally long ranks."""
    text = two_layers()
    check_text(text)
    rows, others = re.findall(r"fxpar\.resize_rows\.default\(%\w+, (%\w+), -1\)", text)
    mutants = [
        text.replace(f"{others}, -1)", f"{rows}, -1)"),
        re.sub(r"(%send_rows_1 = .*\(%\w+), %split_sizes_1\)", r"\1, %split_sizes)", text),
        re.sub(r"(%arrived_order_default_1 = .*\(%\w+), %\w+\)", r"\1, %sym_size_int_1)", text),
        text.replace("f64[2, r1, 8]", "f64[2, r, 8]"),
        text.replace("counted r1 = 2*b*s like 40\n", ""),
        text.replace("counted r1 =", "counted r ="),
        re.sub(r"(%send_rows = .*) : f64\[2, r, 8\]", r"\1 : f64[2, 2*b*s, 8]", text),
        re.sub(r"%return_rows = .*\n", "", text).replace("%return_rows,", "%moe_unpermute_default,"),
        re.sub(r"fxpar\.split_sizes\((%\w+), (%\w+),", r"fxpar.split_sizes(\2, \1,", text),
        re.sub(
            r"(%moe_permute_default_1 = )(.*)\(%send_rows,",
            r"%whole = fxpar.all_gather[dp](%send_rows) : f64[2, r, 8] dp:S(0)→R\n\1\2(%send_rows,",
            text,
        ),
    ]
    for mutant in mutants:
        assert mutant != text
        with pytest.raises(FxparError):
            check_text(mutant)


@pytest.mark.parametrize("dispatch", ["static", "dropless"])
def test_graphs_end_where_the_routing_decides_how_many_rows_there_are(dispatch: str) -> None:
    """The static one is proven to be static by the same checker."""
    program = dispatched(plan(2, 1, 1, 2, dispatch=dispatch))
    _, boundaries = capture_regions(PassManager([differentiate, mark_regions]).run(program))
    reasons = {each.node: each.reason for each in boundaries}
    assert bool(reasons) == (dispatch == "dropless")
    if reasons:
        assert reasons["send_rows"] == "sends as many rows as the routing decides; give experts.dispatch='static'"
        assert {"return_rows", "grouped_linear_default"} <= reasons.keys()
        assert "split_sizes" not in reasons  # whose copy starts in a graph


def test_numbers_of_rows_are_awaited_in_front_of_the_rows() -> None:
    """Rows are taken for their experts meanwhile, in the graph in which the copy to the host starts."""
    program = PassManager([differentiate, mark_regions]).run(dispatched(plan(2, 1, 1, 2)))
    nodes = [
        node for node in lower_program(program, {"dp": Group("dp", 2)}, "cpu").module.graph.nodes if has_note(node)
    ]
    order, marks = [node.name for node in nodes], {node.name: note(node).uncaptured for node in nodes}
    places = [order.index(n) for n in ("split_sizes_start", "moe_permute_default", "split_sizes", "send_rows_start")]
    assert places == sorted(places)
    assert marks["split_sizes_start"] == ""
    assert marks["split_sizes"] == "waits until the host knows them; give experts.dispatch='static'"


def test_what_arrived_stands_by_expert_and_within_one_by_source() -> None:
    """Against the places of the buffers that the static one fills."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 4, (3, 2, 5), generator=generator)
    counts[1] = 0
    most = int(counts.sum((-1, -2)).max())
    order, total = sent_rows.arrived_order(counts, most)
    for each, found, own in zip(counts, order, total, strict=True):
        pairs = [(e, s) for s in range(2) for e in range(5) for _ in range(int(each[s, e]))]
        wanted = sorted(range(len(pairs)), key=lambda place: (*pairs[place], place))
        assert found.tolist() == wanted + [-1] * (most - len(wanted))
        assert own.tolist() == each.sum(0).tolist()


def test_experts_without_rows_have_gradients_of_zero() -> None:
    """No row at all reaches a rank."""
    x = torch.randn(1, 0, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, EXPERTS, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    counts = torch.zeros(1, EXPERTS, dtype=torch.int64)
    made = torch.ops.fxpar.grouped_linear(x, weight, counts, False)
    placed = permute.moe_unpermute(made, torch.zeros(1, 0, dtype=torch.int64), 0, 1)
    placed.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0
