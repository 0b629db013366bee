"""What a backward computes again of forwards that are not compiled with it: what saves memory, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxpar.ir.program import Note, TensorType, set_note
from fxpar.runtime.units import Segment, computing_again

aten = torch.ops.aten
HALF, FULL = torch.bfloat16, torch.float32


class Norm:
    """A forward that computes a norm, and a backward that reads some of it.

    Args:
        made: whether the forward computes what the norm is of, by a product; else it is an input.
        widen: what makes numbers of float32 of it.
    """

    def __init__(self, made: bool = True, widen: Any = aten._to_copy.default) -> None:
        self.graph = fx.Graph()
        x = self.x = self._input("x", HALF, (8, 4))
        self.own: list[fx.Node] = []
        if made:
            x = self.x = self._call(aten.mm.default, (x, self._input("w", HALF, (4, 4))), HALF, (8, 4))
        self.wide = self._call(widen, (x,), FULL, (8, 4))
        self.share = self._call(aten.mean.dim, (self.wide, [-1], True), FULL, (8, 1))
        self.norm = self._call(aten.mul.Tensor, (self.wide, self.share), FULL, (8, 4))
        self.out = self._call(aten._to_copy.default, (self.norm,), HALF, (8, 4))
        self.forward = Segment(tuple(self.own), "layer")

    def _noted(self, node: fx.Node, dtype: torch.dtype, shape: tuple[int, ...]) -> fx.Node:
        return set_note(node, Note(TensorType(dtype, shape)))

    def _input(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> fx.Node:
        return self._noted(self.graph.placeholder(name), dtype, shape)

    def _call(self, target: Any, args: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> fx.Node:
        node = self._noted(self.graph.call_function(target, args), dtype, shape)
        self.own.append(node)
        return node

    def behind(self) -> Segment:
        """Another forward, which takes the result."""
        self.own = []
        self._call(aten.neg.default, (self.out,), HALF, (8, 4))
        return Segment(tuple(self.own), "layer")

    def again(self, *reads: fx.Node, partner: Segment | None = None) -> set[fx.Node]:
        """What a backward computes again that reads these values.

        Args:
            partner: the forward with which it is compiled.
        """
        self.own = []
        for read in reads:
            self._call(aten.neg.default, (read,), FULL, (8, 4))
        backward = Segment(tuple(self.own), "layer_backward", phase="backward")
        found = computing_again(backward, partner, [self.forward])
        assert found.nodes[len(found.again) :] == backward.nodes
        assert set(found.nodes) - set(backward.nodes) == found.again
        return set(found.again)


def test_what_is_wider_than_what_it_is_made_of_is_computed_again() -> None:
    norm = Norm()
    assert norm.again(norm.wide, norm.share) == {norm.wide}
    assert norm.again(norm.norm, norm.share) == {norm.wide, norm.norm}
    assert norm.again(norm.norm, norm.out) == {norm.wide, norm.norm, norm.out}


def test_what_takes_as_many_bytes_is_kept() -> None:
    norm = Norm()
    assert norm.again(norm.out, norm.share) == set()


def test_what_is_made_of_what_is_there_is_computed_again() -> None:
    norm = Norm()
    assert norm.again(norm.out, norm.x) == {norm.wide, norm.norm, norm.out}  # the product is read besides
    norm = Norm(made=False)
    assert norm.again(norm.out) == {norm.wide, norm.norm, norm.out}  # an input is there anyway


def test_a_number_of_each_row_is_no_memory_and_no_product_is_computed_again() -> None:
    norm = Norm()
    assert norm.again(norm.share) == set()
    assert norm.again(norm.x) == set()


def test_the_unit_that_made_it_has_the_cut_of_its_own() -> None:
    norm = Norm()
    assert norm.again(norm.wide, norm.norm, partner=norm.forward) == set()


def test_what_the_unit_takes_is_there() -> None:
    norm = Norm()
    assert norm.again(norm.out, norm.wide, partner=norm.behind()) == {norm.wide}
    assert norm.again(norm.out, norm.wide) == {norm.wide, norm.norm, norm.out}


@pytest.mark.parametrize("widen", [aten.relu_.default, aten.bernoulli.p, aten.cumsum.default])
def test_what_changes_its_operand_draws_or_reads_other_elements_is_kept(widen: Any) -> None:
    norm = Norm(widen=widen)
    assert norm.again(norm.norm) == set() or norm.wide not in norm.again(norm.norm)
    assert norm.wide not in norm.again(norm.wide)
