"""What each rank keeps of a model: cut, initialised or read, the same bits; and how much it holds for that."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors.torch import save_file
from torch import Tensor, nn

import fxpar
from fxpar.capture.capture import capture
from fxpar.checkpoint.initial import Loading, parts
from fxpar.checkpoint.state_dicts import RankTensors
from fxpar.errors import CheckpointError
from fxpar.ir.program import output_layouts
from fxpar.layout.layout import I, Layout, Piece, Placement, padded_shard, shard
from fxpar.layout.shards import boxes, local_block
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.runtime.shard_spec import named_tensors
from tests.checkpoint.live import LiveBytes
from tests.zoo import CASES

SEED = 11
AXES = {"tp": 4, "dp": 2}
SEGMENTS = (Piece(1, 16), Piece(1, 8, copies=2), Piece(1, 4, False))  # cut, shared by neighbours, whole
LAYOUTS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "rows": ((16, 6), Layout.of({"tp": shard(0, 16)})),
    "columns": ((6, 16), Layout.of({"tp": shard(1, 16)})),
    "fused": ((24, 5), Layout.of({"tp": Placement("S", 0, (Piece(3, 8),))})),
    "segments": ((28,), Layout.of({"tp": Placement("S", 0, SEGMENTS)})),
    "vocabulary": ((259, 3), Layout.of({"tp": padded_shard(0, 259, 4)})),
    "padding alone": ((5, 3), Layout.of({"tp": padded_shard(0, 5, 4)})),
    "both dimensions": ((16, 8), Layout.of({"tp": shard(0, 16), "dp": shard(1, 8)})),
    "one dimension twice": ((16, 8), Layout.of({"tp": shard(0, 16), "dp": shard(0, 4)})),
    "many runs": ((800,), Layout.of({"tp": Placement("S", 0, (Piece(100, 8),))})),
    "whole": ((3, 2), Layout.of({"tp": I})),
    "scalar": ((), Layout()),
}


def places() -> Any:
    return [dict(zip(AXES, place, strict=True)) for place in itertools.product(*map(range, AXES.values()))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_boxes_are_the_blocks_and_fill_the_whole_once(name: str) -> None:
    shape, layout = LAYOUTS[name]
    whole = torch.randn(shape)
    filled = torch.zeros(shape)
    for place in places():
        own = local_block(whole, layout, AXES, place)
        held = 0
        for box in boxes(shape, layout, AXES, place):
            assert torch.equal(box.within(own), whole[box.slices])
            held += box.within(own).numel()
            if box.stands and not any(place[axis] for axis in AXES if axis not in dict(layout) or name == "whole"):
                filled[box.slices] += 1
        assert held == int((own != 0).sum())
    assert torch.equal(filled, torch.ones(shape))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_reads_its_block_alone(name: str, tmp_path: Path) -> None:
    shape, layout = LAYOUTS[name]
    whole = torch.randn(shape)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    checkpoint = fxpar.Checkpoint(tmp_path)
    for place in places():
        own = local_block(whole, layout, AXES, place)
        with checkpoint.reading() as reader:
            found = reader.part("w", layout, AXES, place)
        assert torch.equal(found, own)
        assert found.untyped_storage().nbytes() == own.numel() * 4
        real = int((own != 0).sum()) if name != "many runs" else whole.numel()
        assert reader.bytes_read == 4 * real


@functools.cache
def layouts(name: str, tp: int) -> dict[str, Layout]:
    """Of a case's parameters under all their names, as they are chosen for tp ranks."""
    case = CASES[name]
    batch = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), case.example())
    captured = capture(meta(name), batch, fxpar.Plan(tp=tp), case.loss)
    program = PassManager(DEFAULT_PASSES).run(captured.program)
    return {name: output_layouts(program.node(p.node))[0] for p in program.parameters for name in (p.fqn, *p.tied)}


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return CASES[name].build().train()


def share(model: nn.Module, found: dict[str, Layout], tp: int, rank: int) -> RankTensors:
    tensors = named_tensors(model)
    shapes = {name: tuple(entry.tensor.shape) for entry in tensors for name in entry.names}
    layout_of = {**dict.fromkeys(shapes, Layout()), **found}.__getitem__
    return RankTensors(tensors, list(model.state_dict()), shapes.__getitem__, layout_of, {"tp": tp}, {"tp": rank})


_CPU = torch.device("cpu")
_CHOSEN = [("gpt2", 4), ("bert", 2)]
_MORE = [("gpt2", 2), ("bert", 4), ("llama", 2), ("llama", 4)]


@pytest.mark.parametrize(("name", "tp"), [*_CHOSEN, *(pytest.param(*m, marks=pytest.mark.matrix) for m in _MORE)])
def test_ranks_hold_their_parts_of_the_reference_and_one_module(name: str, tp: int) -> None:
    reference = {entry.first: entry.tensor.detach() for entry in named_tensors(fxpar.materialize(meta(name), SEED))}
    found = layouts(name, tp)
    assert any(str(layout).startswith("tp:S") for layout in found.values())
    for rank in range(tp):
        model, loading = meta(name), Loading()
        own = share(model, found, tp, rank)
        with LiveBytes() as live:
            made = parts(model, own, SEED, _CPU, None, None, loading)
        assert made.keys() == reference.keys()
        for fqn, value in made.items():
            assert torch.equal(value, local_block(reference[fqn], own.layout_of(fqn), own.axes, own.coordinates)), fqn
        held = sum(value.nbytes for value in made.values())
        largest = max(value.nbytes for value in reference.values())
        assert loading.held == held == live.now
        # A module, the byte an element that tells whether it is filled, the part that is cut, the random state.
        assert held <= loading.peak <= live.peak <= held + 2 * largest + 20_000
        assert live.peak < sum(value.nbytes for value in reference.values())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ranks_read_their_parts_and_hold_one_tensor_more(tmp_path: Path, dtype: torch.dtype | None) -> None:
    reference = fxpar.materialize(meta("gpt2"), SEED)
    reference.save_pretrained(tmp_path)  # type: ignore[operator]
    model, loading = meta("gpt2"), Loading()
    own = share(model, layouts("gpt2", 4), 4, 1)
    with LiveBytes() as live:
        made = parts(model, own, 0, _CPU, dtype, fxpar.Checkpoint(tmp_path), loading)
    for entry in named_tensors(reference):
        wanted = local_block(entry.tensor.detach(), own.layout_of(entry.first), own.axes, own.coordinates)
        assert torch.equal(made[entry.first], wanted.to(dtype or wanted.dtype))
    largest = max(entry.tensor.nbytes for entry in named_tensors(reference))
    assert loading.held == live.now == sum(value.nbytes for value in made.values())
    assert live.peak <= loading.held + 2 * largest  # one is mapped from the file, one is the part
    assert loading.peak <= loading.held + largest
    # Padding is not read, and is of the size of at most one row of each table on each rank.
    assert 0 <= loading.held * (1 if dtype is None else 2) - loading.read <= 4 * 96 * 2


def test_other_kinds_of_numbers_are_refused(tmp_path: Path) -> None:
    reference = fxpar.materialize(meta("gpt2"), SEED)
    state = {name: value.detach().clone() for name, value in reference.named_parameters()}
    name = "transformer.h.0.mlp.c_fc.weight"
    save_file({**state, name: (state[name] * 100).to(torch.int8)}, tmp_path / "model.safetensors")
    own = share(meta("gpt2"), layouts("gpt2", 4), 4, 1)
    with pytest.raises(CheckpointError) as caught:
        parts(meta("gpt2"), own, 0, _CPU, None, fxpar.Checkpoint(tmp_path), Loading())
    assert caught.value.where.endswith(name)
    assert caught.value.reason == "holds numbers of the kind int, and the model's are float"


def test_an_index_is_believed_where_it_is_right(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    assert fxpar.Checkpoint(tmp_path).shapes == {"a": (2,), "b": (3,)}
    assert fxpar.Checkpoint(index, lambda name: None if name == "a" else name.upper()).shapes == {"B": (3,)}
    one, both = fxpar.Checkpoint(tmp_path / "one.safetensors"), fxpar.Checkpoint(tmp_path)
    assert one.digest != both.digest == fxpar.Checkpoint(index).digest
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "one.bin").touch()
    refused: dict[Any, str] = {
        tmp_path: "the folder holds both",
        tmp_path / "missing.safetensors": "there is no such file",
        tmp_path / "one.bin": "must be a safetensors checkpoint",
    }
    for path, reason in refused.items():
        with pytest.raises(CheckpointError, match=reason):
            fxpar.Checkpoint(path)
    with pytest.raises(CheckpointError, match="a and b get the same name"):
        fxpar.Checkpoint(index, lambda name: "x")
    for text, reason in {
        '{"weight_map": {"a": "two.safetensors"}}': "two.safetensors lacks a",
        '{"weight_map": {"a": "../two.safetensors"}}': "in another folder",
        '{"weight_map": {"a": "three.safetensors"}}': "there is no such file",
        '{"weight_map": 3}': "cannot be read as an index",
        "[": "cannot be read as an index",
    }.items():
        index.write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            fxpar.Checkpoint(index)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds neither"):
        fxpar.Checkpoint(tmp_path / "empty")
