"""What a call returns: the model's own output, with sharded tensors as DTensor.

Enters: a rank's results by name. Leaves: the nest that the author's forward returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxpar.errors import InputError
from fxpar.ir.program import TensorType, note, output_layouts
from fxpar.layout.layout import Layout, Placement, R, shard
from fxpar.layout.nesting import seen_by
from fxpar.layout.shards import without_padding
from fxpar.layout.symbolic_sizes import Size, evaluate
from fxpar.mesh.axes import PURPOSES, Cuts
from fxpar.ops.process_group import Cut, Group, gather_whole, take
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.rank_batches import data_part
from fxpar.runtime.world import World


def returned(call: BoundBatch, outputs: Mapping[str, Tensor], world: World) -> Any:
    """Returns the nest of a call's outputs.

    Raises:
        InputError: an output of which ranks share parts.
    """
    spec, nodes = call.compiled.captured.spec, call.compiled.program.output_nodes()
    leaves = [
        _whole_or_dtensor(str(what), outputs[str(what)], output_layouts(nodes[str(what)])[0], call, world)
        if kind == "output"
        else what
        for kind, what in spec.out_leaves
    ]
    return pytree.tree_unflatten(leaves, spec.out_spec)


def _with_plain_gradient(value: Tensor) -> Tensor:
    """Returns the value. Where a loss of the author's own joins it with a DTensor, its gradient comes as one."""
    if not value.requires_grad:
        return value
    view = value.view_as(value) if value.is_leaf else value  # a hook on a parameter would stay
    view.register_hook(lambda gradient: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return view


def _whole_or_dtensor(name: str, value: Tensor, layout: Layout, call: BoundBatch, world: World) -> Any:
    """Returns a sharded output as DTensor where its shards are even blocks of dimensions; others are gathered."""
    program = call.compiled.program
    if not any(placement.is_shard for _, placement in layout):
        return _with_plain_gradient(value)
    kind = note(program.output_nodes()[name]).type
    assert isinstance(kind, TensorType)
    for axis in reversed([axis for axis, _ in layout]):
        seen = seen_by(layout, kind.shape, program.axes)[axis]
        placement = layout.on(axis)
        if placement.is_shard and not _is_block(placement, seen):
            if call.rows and PURPOSES[axis].cuts is Cuts.BATCH:
                _refuse_rows(name, call.rows)
            value = _gathered(name, value, axis, placement, call, world)
            layout = layout.with_(axis, R)
    cuts = dict(layout)
    if not any(placement.is_shard for placement in cuts.values()):
        return _with_plain_gradient(value)
    # The last ranks may hold less than the first: the whole shape cannot be told from the part.
    local = without_padding(value, layout, program.axes, world.coordinates)
    shape = torch.Size([evaluate(size, call.sizes) for size in kind.shape])
    if call.rows:
        mine = call.rows[data_part(world.mesh, world.rank)]
        shape = _whole_shape(name, local.shape, shape, layout, call, mine)
    mesh = world.device_mesh
    assert mesh.mesh_dim_names is not None
    placements = [cuts[axis] for axis in mesh.mesh_dim_names]
    return DTensor.from_local(
        local,
        mesh,
        [Shard(placement.dim) if placement.is_shard else Replicate() for placement in placements],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _whole_shape(
    name: str, local: Sequence[int], shape: Sequence[int], layout: Layout, call: BoundBatch, mine: int
) -> torch.Size:
    """Returns the shape of the whole where data ranks hold other numbers of rows, as `DTensor` can say it.

    Args:
        local: this rank's shape.
        shape: of the whole, if all ranks held as many rows as this one.
        mine: this rank's rows.

    Raises:
        InputError: the ranks' parts do not lie as `torch.chunk` would lay them.
    """
    sizes = list(shape)
    for axis, placement in layout:
        if placement.is_shard and PURPOSES[axis].cuts is Cuts.BATCH:
            unit = local[placement.dim] // mine
            parts = [unit * rows for rows in call.rows]
            if [len(part) for part in torch.arange(sum(parts)).chunk(len(parts))] != parts:
                _refuse_rows(name, call.rows)
            sizes[placement.dim] = sum(parts)
    return torch.Size(sizes)


def _refuse_rows(name: str, rows: Sequence[int]) -> NoReturn:
    raise InputError(
        f"the data ranks hold {', '.join(map(str, rows))} rows of it, which no DTensor says",
        where=f"output {name}",
        remedy="pass as many rows on each data rank, or as torch.chunk cuts them; train_step takes any",
    )


def _is_block(placement: Placement, shape: Sequence[Size]) -> bool:
    """Returns whether the ranks hold one block each, in their order, as `Shard` says."""
    return placement.is_padded or placement == shard(placement.dim, shape[placement.dim])


def _gathered(name: str, value: Tensor, axis: str, placement: Placement, call: BoundBatch, world: World) -> Tensor:
    if placement.is_shared:
        raise InputError(f"the ranks hold {placement} of it", where=f"output {name}", remedy="do not return it")
    pieces = [(evaluate(p.outer, call.sizes), evaluate(p.size, call.sizes)) for p in placement.pieces]
    group = world.groups[axis]
    index = call.compiled.indices[call.compiled.lowered.indices.index(axis)]
    whole: Tensor = _Gathered.apply(value, (placement.dim, pieces), group, index)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """A shard as the whole that the author's own code goes on with, alike on every rank."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cut: Cut, group: Group, index: Tensor) -> Tensor:
        """Returns the whole."""
        ctx.cut, ctx.group = cut, group
        ctx.save_for_backward(index)
        return gather_whole(value, cut, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the rank's shard of the gradient."""
        (dim, pieces), (index,) = ctx.cut, ctx.saved_tensors
        return take(gradient, dim, pieces, ctx.group.size, index), None, None, None


# A step behind one node of autograd: outputs that the caller differentiates.


# From the tangents by name of the output to the gradients by name of the parameter.
Backward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class StepNode(torch.autograd.Function):
    """The outputs of a step; its backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Backward, outputs: Mapping[str, Tensor], parameters: Sequence[str], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the outputs, which are there already.

        Args:
            run: the backward, which is run once.
            parameters: names of the leaves.
        """
        ctx.set_materialize_grads(False)
        ctx.run, ctx.names, ctx.parameters = run, tuple(outputs), parameters
        return tuple(output.detach() for output in outputs.values())

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """Returns the gradients of the leaves.

        Raises:
            InputError: the backward is to be differentiated, or it has run.
        """
        if torch.is_grad_enabled():
            raise InputError(
                "its gradients cannot be differentiated again: a step has no second derivative",
                where="backward(create_graph=True)",
                remedy="leave create_graph out; for a penalty on gradients run the model without fxpar",
            )
        if ctx.run is None:
            raise InputError(
                "the backward of this call has run, and what it needs is freed: no graph is retained",
                where="backward(retain_graph=True)",
                remedy="add the losses and call backward() once, or call the model again",
            )
        run, ctx.run = ctx.run, None
        named = {name: tangent for name, tangent in zip(ctx.names, tangents, strict=True) if tangent is not None}
        gradients = run(named) if named else {}
        return None, None, None, *(gradients.get(name) for name in ctx.parameters)


def differentiable(
    outputs: Mapping[str, Tensor], names: Sequence[str], leaves: Mapping[str, Tensor], run: Backward
) -> dict[str, Tensor]:
    """Returns the outputs, some of which can be differentiated.

    Args:
        names: those that can.
        leaves: the tensors whose gradients the backward gives, by name of the parameter.
    """
    chosen = {name: outputs[name] for name in names}
    tracked: Any = StepNode.apply(run, chosen, tuple(leaves), *leaves.values())  # type: ignore[no-untyped-call]
    return {**outputs, **dict(zip(names, tracked, strict=True))}
