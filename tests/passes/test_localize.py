"""localize: global sizes become one rank's sizes; every rank gets the same text."""

import os
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch.distributed as dist
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.errors import LayoutError
from fxpar.ir.program import Program, note, output_types
from fxpar.manager import PassManager
from fxpar.passes import localize
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC
from tests.passes.modules import (
    MLP,
    FusedAttention,
    GatedMLP,
    GroupedAttention,
    InterleavedAttention,
    NormedHeads,
    UnequalAttention,
    build,
    changed_by,
    run,
    shown,
)

ATTENTION = {"qkv": "head", "out": "row"}

FUSED_LOCAL = """\
… 15
%split = aten.split_with_sizes.default(%linear_bias, [48, 48, 48], 2) : (f32[b, s, 96] tp:S(2); f32[b, s, 96] tp:S(2); f32[b, s, 96] tp:S(2))
… 3
%view = aten.view.default(%getitem, [%b, %s, 4, 12]) : f32[b, s, 8, 12] tp:S(2)
… 1
%view_1 = aten.view.default(%getitem_1, [%b, %s, 4, 12]) : f32[b, s, 8, 12] tp:S(2)
… 1
%view_2 = aten.view.default(%getitem_2, [%b, %s, 4, 12]) : f32[b, s, 8, 12] tp:S(2)
… 3
%view_3 = aten.view.default(%transpose_3, [%b, %s, 48]) : f32[b, s, 96] tp:S(2)
… 6
"""  # noqa: E501

GROUPED_LOCAL = """\
… 8
%view = aten.view.default(%linear, [%b, %s, 4, 12]) : f32[b, s, 8, 12] tp:S(2)
… 2
%view_1 = aten.view.default(%linear_1, [%b, %s, 2, 12]) : f32[b, s, 4, 12] tp:S(2)
… 2
%view_2 = aten.view.default(%linear_2, [%b, %s, 2, 12]) : f32[b, s, 4, 12] tp:S(2)
… 2
%expand = aten.expand.default(%unsqueeze, [%b, 2, 2, %s, 12]) : f32[b, 4, 2, s, 12] tp:S(1)
… 1
%_unsafe_view = aten.view.default(%clone, [%b, 4, %s, 12]) : f32[b, 8, s, 12] tp:S(1)
… 1
%expand_1 = aten.expand.default(%unsqueeze_1, [%b, 2, 2, %s, 12]) : f32[b, 4, 2, s, 12] tp:S(1)
… 1
%_unsafe_view_1 = aten.view.default(%clone_1, [%b, 4, %s, 12]) : f32[b, 8, s, 12] tp:S(1)
… 2
%view_3 = aten.view.default(%transpose_3, [%b, %s, 48]) : f32[b, s, 96] tp:S(2)
… 5
"""

INTERLEAVED_LOCAL = """\
… 12
%view = aten.view.default(%linear_bias, [%b, %s, 4, 3, 12]) : f32[b, s, 8, 3, 12] tp:S(2)
… 15
%_unsafe_view = aten.view.default(%clone, [%b, %s, 48]) : f32[b, s, 96] tp:S(2)
… 6
"""


@pytest.mark.parametrize(
    ("kind", "split", "expected"),
    [
        (FusedAttention, ATTENTION, FUSED_LOCAL),
        (GroupedAttention, {"[qkv]": "head", "out": "row"}, GROUPED_LOCAL),
        (InterleavedAttention, ATTENTION, INTERLEAVED_LOCAL),
    ],
)
def test_golden(kind: Callable[..., nn.Module], split: dict[str, str], expected: str) -> None:
    assert changed_by("localize", build(kind)[1].program, split=split) == expected


MODULES: list[tuple[Callable[..., nn.Module], tuple[bool, ...], dict[str, str]]] = [
    (MLP, (), {"up": "column", "down": "row"}),
    (FusedAttention, (), ATTENTION),
    (GroupedAttention, (), {"[qkv]": "head", "out": "row"}),
    (InterleavedAttention, (), ATTENTION),
    (NormedHeads, (), {"q": "head", "out": "row"}),
    (UnequalAttention, (True,), ATTENTION),
    (GatedMLP, (), {"gate_up": "column", "down": "row"}),
]


@pytest.mark.parametrize(("kind", "args", "split"), MODULES)
def test_types_stay_global_and_nothing_but_sizes_changes(
    kind: Callable[..., nn.Module], args: tuple[bool, ...], split: dict[str, str]
) -> None:
    before, after = run(build(kind, *args)[1], split, until="assign_rng"), run(build(kind, *args)[1], split)
    assert [(n.name, output_types(n)) for n in nodes(before)] == [(n.name, output_types(n)) for n in nodes(after)]
    sized = ("view", "_unsafe_view", "reshape", "expand", "split", "chunk", "slice")
    assert all(name.startswith(sized) for name in after.history[-1].changed)
    assert (after.history[-1].added, after.history[-1].erased) == ((), ())


def nodes(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op != "output"]


# ------------------------------------------------------------------ literals, one kind at a time

HEAD = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts rng vocabulary
symbol b = x.0 like 4
%w = parameter["w"] : f32[24, 6] tp:S(0)
%f = parameter["f"] : f32[24, 6] tp:S(0: 3 x 8)
%x = input["x"] : f32[b, 6] tp:R
%b = aten.sym_size.int(%x, 0) : b
%y = aten.linear.default(%x, %w) : f32[b, 24] tp:S(1)
%z = aten.linear.default(%x, %f) : f32[b, 24] tp:S(1: 3 x 8)
"""


def local(*lines: str, tp: int = 2) -> list[str]:
    """The lines of the operations after the pass, without types; checked statically before and after."""
    text = HEAD.replace('"tp": 2', f'"tp": {tp}') + "\n".join([*lines, "return out=%out", ""])
    result = PassManager([localize], STATIC).run(parse_program(text))
    return [line.split(" : ")[0] for line in shown(result).splitlines()[6:-1]]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("aten.view.default(%y, [%b, 4, 6]) : f32[b, 4, 6] tp:S(1)", "aten.view.default(%y, [%b, 2, 6])"),
        ("aten.view.default(%y, [%b, -1, 6]) : f32[b, 4, 6] tp:S(1)", "aten.view.default(%y, [%b, -1, 6])"),
        ("aten.view.default(%y, [-1]) : f32[24*b] tp:S(0: b x 24)", "aten.view.default(%y, [-1])"),
        ("aten.reshape.default(%y, [%b, 4, 6]) : f32[b, 4, 6] tp:S(1)", "aten.reshape.default(%y, [%b, 2, 6])"),
        ("aten.expand.default(%y, [3, %b, 24]) : f32[3, b, 24] tp:S(2)", "aten.expand.default(%y, [3, %b, 12])"),
        ("aten.expand.default(%y, [3, -1, -1]) : f32[3, b, 24] tp:S(2)", "aten.expand.default(%y, [3, -1, -1])"),
        ("aten.slice.Tensor(%z, 1, 0, 8) : f32[b, 8] tp:S(1)", "aten.slice.Tensor(%z, 1, 0, 4)"),
        ("aten.slice.Tensor(%z, 1, 8, 16) : f32[b, 8] tp:S(1)", "aten.slice.Tensor(%z, 1, 4, 8)"),
        ("aten.slice.Tensor(%z, 1, -16, -8) : f32[b, 8] tp:S(1)", "aten.slice.Tensor(%z, 1, 4, 8)"),
        (
            "aten.slice.Tensor(%z, 1, 8, 9223372036854775807) : f32[b, 16] tp:S(1: 2 x 8)",
            "aten.slice.Tensor(%z, 1, 4, 12)",
        ),
        ("aten.slice.Tensor(%z, 1, 8, 16, 2) : f32[b, 4] tp:S(1)", "aten.slice.Tensor(%z, 1, 4, 8, 2)"),
        ("aten.slice.Tensor(%z, 1, 9, 16, 2) : f32[b, 4] tp:S(1)", "aten.slice.Tensor(%z, 1, 5, 8, 2)"),
        (
            "aten.slice.Tensor(%y, 1, 1, 9223372036854775807, 2) : f32[b, 12] tp:S(1)",
            "aten.slice.Tensor(%y, 1, 1, 12, 2)",
        ),
        ("aten.slice.Tensor(%y, 0, 0, 2) : f32[2, 24] tp:S(1)", "aten.slice.Tensor(%y, 0, 0, 2)"),
        ("aten.transpose.int(%y, 0, 1) : f32[24, b] tp:S(0)", "aten.transpose.int(%y, 0, 1)"),
    ],
)
def test_literals_of_one_value(line: str, wanted: str) -> None:
    assert local(f"%out = {line}") == [f"%out = {wanted}"]


@pytest.mark.parametrize(
    "line",
    [
        "aten.split.Tensor(%z, 8, 1) : (f32[b, 8] tp:S(1); f32[b, 8] tp:S(1); f32[b, 8] tp:S(1))",
        "aten.chunk.default(%z, 3, -1) : (f32[b, 8] tp:S(1); f32[b, 8] tp:S(1); f32[b, 8] tp:S(1))",
        "aten.split_with_sizes.default(%z, [8, 8, 8], 1) : (f32[b, 8] tp:S(1); f32[b, 8] tp:S(1); f32[b, 8] tp:S(1))",
    ],
)
def test_splits_of_a_cut_dimension_become_sizes(line: str) -> None:
    found = local(f"%parts = {line}", "%out = operator.getitem(%parts, 0) : f32[b, 8] tp:S(1)")
    assert found[0] == "%parts = aten.split_with_sizes.default(%z, [4, 4, 4], 1)"


def test_parts_of_unequal_size_keep_their_proportion() -> None:
    line = "aten.split_with_sizes.default(%z, [8, 16], -1) : (f32[b, 8] tp:S(1); f32[b, 16] tp:S(1: 2 x 8))"
    found = local(f"%parts = {line}", "%out = operator.getitem(%parts, 0) : f32[b, 8] tp:S(1)", tp=4)
    assert found[0] == "%parts = aten.split_with_sizes.default(%z, [2, 4], 1)"


def test_splits_of_another_dimension_stay() -> None:
    lines = [
        "%v = aten.view.default(%y, [%b, 4, 6]) : f32[b, 4, 6] tp:S(1)",
        "%parts = aten.split.Tensor(%v, 3, 2) : (f32[b, 4, 3] tp:S(1); f32[b, 4, 3] tp:S(1))",
        "%out = operator.getitem(%parts, 0) : f32[b, 4, 3] tp:S(1)",
    ]
    assert local(*lines)[1] == "%parts = aten.split.Tensor(%v, 3, 2)"


def test_a_symbolic_size_is_divided_by_a_node() -> None:
    lines = [
        "%n = operator.mul(%b, 2) : 2*b",
        "%c = aten.cat.default([%x, %x]) : f32[2*b, 6] tp:R",
        "%t = fxpar.r_to_s[tp](%c) : f32[2*b, 6] tp:R→S(0)",
        "%out = aten.view.default(%t, [%n, 2, 3]) : f32[2*b, 2, 3] tp:S(0)",
    ]
    assert local(*lines)[-2:] == [
        "%n_local = operator.floordiv(%n, 2)",
        "%out = aten.view.default(%t, [%n_local, 2, 3])",
    ]


def test_four_ranks_hold_a_quarter() -> None:
    assert local("%out = aten.view.default(%y, [%b, 4, 6]) : f32[b, 4, 6] tp:S(1)", tp=4)[-1].endswith("[%b, 1, 6])")


def test_a_size_that_is_read_off_a_cut_dimension_is_refused() -> None:
    lines = ["%n = aten.sym_size.int(%y, 1) : 24", "%out = aten.expand.default(%y, [%b, %n]) : f32[b, 24] tp:S(1)"]
    with pytest.raises(LayoutError, match=r"%n: on axis tp: reads a number off %y, which is S\(1\)"):
        local(*lines)


# ------------------------------------------------------------------ one text for all ranks


def texts_on(rank: int, size: int) -> list[str]:
    """The texts that a process of some world would compile."""
    with mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size)):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            return [print_program(run(build(kind, *args)[1], split)) for kind, args, split in MODULES]
        finally:
            dist.destroy_process_group()


def test_every_rank_compiles_the_same_text_and_so_does_a_process_without_a_world() -> None:
    alone = [print_program(run(build(kind, *args)[1], split)) for kind, args, split in MODULES]
    assert texts_on(0, 2) == texts_on(1, 2) == texts_on(3, 4) == alone


@pytest.mark.parametrize(("kind", "args", "split"), MODULES)
def test_the_text_names_no_rank_address_device_group_or_path(
    kind: Callable[..., nn.Module], args: tuple[bool, ...], split: dict[str, str]
) -> None:
    program = run(build(kind, *args)[1], split)
    text = print_program(program)
    assert re.findall(r"0x[0-9a-f]+|object at|\brank|cuda|cpu|device|group|process|(?<![\w*])/\w", text) == []
    assert all(note(node).layout is not None for node in nodes(program) if output_types(node))
