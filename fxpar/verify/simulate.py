"""All ranks of a program in one CPU process, by PyTorch's LocalTensorMode.

Enters: a localised program, whole weights and inputs. Leaves: every rank's outputs and parameter gradients. The ranks
execute the very operators of the runtime, collectives included; only the process group is simulated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpar.errors import CheckFailed
from fxpar.layout import Layout
from fxpar.ops.collectives import Group
from fxpar.ops.lower import Lowered, lower
from fxpar.program import Program, output_layouts
from fxpar.shards import local_block


@dataclass(frozen=True)
class Run:
    """Results of one forward and backward.

    Attributes:
        outputs: by output name.
        gradients: by parameter name; parameters that the loss does not reach are left out.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


@contextlib.contextmanager
def simulated_world(axes: Mapping[str, int]) -> Iterator[dict[str, Group]]:
    """Process groups of ranks that exist in this process only; yields the group of each axis.

    Args:
        axes: sizes of the mesh axes; at most one as yet.

    Raises:
        CheckFailed: the process already belongs to a process group, or there are several axes.
    """
    if len(axes) > 1:
        raise CheckFailed(f"ranks of {len(axes)} axes cannot be simulated yet", where="simulation")
    if dist.is_initialized():
        raise CheckFailed(
            "the process belongs to a process group already",
            where="simulation",
            remedy="verify values in a process that was not started by torchrun",
        )
    world = math.prod(axes.values())
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield {axis: Group(dist.group.WORLD.group_name, size) for axis, size in axes.items()}  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """A rank's index on every axis, the first axis running fastest."""
    found = {}
    for axis, n in axes.items():
        found[axis], rank = rank % n, rank // n
    return found


def run_single(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Run:
    """Runs a program without mesh axes on this device.

    Args:
        state: parameters, buffers and constants by name.
        inputs: by path.
    """
    leaves = {name: value.detach().clone() for name, value in state.items()}
    for parameter in program.parameters:
        leaves[parameter.fqn].requires_grad_(parameter.trainable)
    lowered = lower(program, {})
    values = [leaves[p.fqn] for p in program.parameters] + [inputs[i.path] for i in program.inputs]
    order = dict(zip(_names(program), values, strict=True))
    with torch.enable_grad():
        outputs = dict(zip(program.outputs, lowered.module(*[order[name] for name in lowered.inputs]), strict=True))
        if program.loss and outputs[program.loss].requires_grad:
            outputs[program.loss].backward()
    gradients = {n: t.grad for n, t in leaves.items() if t.grad is not None}
    return Run({n: t.detach() for n, t in outputs.items()}, gradients)


def _names(program: Program) -> list[str]:
    return [p.node for p in program.parameters] + [i.node for i in program.inputs]


def run_ranks(
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    lowering: Callable[[Program, Mapping[str, Group]], Lowered] = lower,
) -> list[Run]:
    """Runs a localised program on all ranks at once; arguments whole, as for `run_single`.

    Args:
        sizes: values of the symbols.
        lowering: makes the module that the ranks run.
    """
    axes = program.axes
    world = math.prod(axes.values())
    layouts = _placeholder_layouts(program)
    places = [coordinates(axes, rank) for rank in range(world)]

    def local(name: str, value: Tensor) -> LocalTensor:
        blocks = {r: local_block(value, layouts[name], axes, places[r], sizes).clone() for r in range(world)}
        return LocalTensor(blocks)

    with simulated_world(axes) as groups, LocalTensorMode(world):
        lowered = lowering(program, groups)
        by_name: dict[str, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        for parameter in program.parameters:
            leaf = local(parameter.node, state[parameter.fqn].detach())
            leaves[parameter.fqn] = leaf.requires_grad_(parameter.trainable)
            by_name[parameter.node] = leaf
        for entry in program.inputs:
            by_name[entry.node] = local(entry.node, inputs[entry.path])
        ranks = [LocalTensor({r: torch.tensor(places[r][axis]) for r in range(world)}) for axis in lowered.indices]
        with torch.enable_grad():
            results = lowered.module(*[by_name[name] for name in lowered.inputs], *ranks)
            outputs = dict(zip(program.outputs, results, strict=True))
            if program.loss and outputs[program.loss].requires_grad:
                outputs[program.loss].backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return [
        Run({n: _rank(t, r) for n, t in outputs.items()}, {n: _rank(g, r) for n, g in gradients.items()})
        for r in range(world)
    ]


def _rank(value: Tensor, rank: int) -> Tensor:
    return value._local_tensors[rank].detach() if isinstance(value, LocalTensor) else value.detach()


def _placeholder_layouts(program: Program) -> dict[str, Layout]:
    return {n.name: output_layouts(n)[0] for n in program.graph.nodes if n.op == "placeholder"}
