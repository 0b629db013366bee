"""The parallel module: one rank's part of a model, which trains, evaluates and saves under the author's names.

Enters: a model, its plan and the processes. Leaves: `ParallelModule`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxpar.capture import Captured, arguments, capture
from fxpar.errors import InputError
from fxpar.layout import Layout
from fxpar.manager import Pass, PassManager
from fxpar.ops.lower import Lowered, lower
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.plan import Plan
from fxpar.program import Program, output_layouts
from fxpar.runtime.recompute import apply_recompute
from fxpar.runtime.state import clip_grad_norm_, full_state_dict, load_full_state_dict
from fxpar.runtime.world import World
from fxpar.shards import local_block
from fxpar.verify.static import STATIC


@dataclass(frozen=True)
class Compiled:
    """A program for one mode and one structure of the batch, ready to run."""

    captured: Captured
    program: Program
    lowered: Lowered
    run: nn.Module


class ParallelModule(nn.Module):
    """One rank's part of a model. Made by `fxpar.parallelize`.

    Parameters are this rank's shards under the author's names. Programs are compiled on first use for each mode
    (training, evaluation), with or without loss, and each structure of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: World,
        example: Any,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
    ) -> None:
        super().__init__()
        self.plan, self.world = plan, world
        self._loss, self._passes = loss, tuple(passes)
        self._saved_names = list(model.state_dict().keys())
        self._programs: dict[Any, Compiled] = {}
        self._step = 0
        captured = capture(model, example, plan, loss)
        program = PassManager(self._passes, STATIC).run(captured.program)
        self.layouts: dict[str, Layout] = _parameter_layouts(program)
        self._shapes = {p.fqn: p.type for p in program.parameters}
        self._tied = {p.fqn: p.tied for p in program.parameters}
        self._adopt(model)
        self._skeleton = [_skeleton_of(model)]  # in a list: its modules are not ours
        self.train(model.training)
        self._programs[self._key(example, True)] = self._ready(captured, program)

    # ------------------------------------------------------------------ weights

    def _adopt(self, model: nn.Module) -> None:
        """Takes this rank's shards of the model's parameters, and its buffers whole."""
        owned: dict[int, nn.Parameter] = {}
        for name, value in model.named_parameters(remove_duplicate=False):
            if id(value) not in owned:
                part = local_block(value.detach(), self._layout(name), self.plan.axes, self.world.coordinates)
                fresh = part.to(self.world.device, copy=True).contiguous()
                owned[id(value)] = nn.Parameter(fresh, requires_grad=value.requires_grad)
            _attach(self, name, lambda m, leaf, v=value: m.register_parameter(leaf, owned[id(v)]))
        kept = set(self._saved_names)
        for name, value in model.named_buffers(remove_duplicate=False):
            fresh = value.detach().to(self.world.device, copy=True)
            _attach(self, name, lambda m, leaf, b=fresh, n=name: m.register_buffer(leaf, b, persistent=n in kept))

    def _layout(self, name: str) -> Layout:
        if name in self.layouts:
            return self.layouts[name]
        for first, others in self._tied.items():
            if name in others:
                return self.layouts[first]
        return Layout()

    # ------------------------------------------------------------------ programs

    def _key(self, batch: Any, with_loss: bool) -> Any:
        leaves, spec = pytree.tree_flatten(batch)
        constants = tuple(x if not isinstance(x, Tensor) else (x.dtype, x.dim()) for x in leaves)
        return self.training, with_loss or not callable(self._loss), str(spec), constants

    def _compiled(self, batch: Any, with_loss: bool) -> Compiled:
        key = self._key(batch, with_loss)
        if key not in self._programs:
            skeleton = self._skeleton[0].train(self.training)
            example = pytree.tree_map_only(Tensor, lambda t: _at_least_two(t).to("meta"), batch)
            loss = self._loss if with_loss else (self._loss if isinstance(self._loss, str) else None)
            captured = capture(skeleton, example, self.plan, loss if self._has_loss(loss, batch) else None)
            program = PassManager(self._passes, STATIC).run(captured.program)
            layouts = _parameter_layouts(program)
            odd = [n for n, layout in layouts.items() if n in self.layouts and self.layouts[n] != layout]
            if odd:
                raise InputError("this call would need another split", where=odd[0], remedy="call it as the example")
            self._programs[key] = self._ready(captured, program)
        return self._programs[key]

    def _has_loss(self, loss: Any, batch: Any) -> bool:
        """Evaluation may leave the labels out, and with them the named loss."""
        return callable(loss) or (isinstance(loss, str) and self.training)

    def _ready(self, captured: Captured, program: Program) -> Compiled:
        lowered = lower(program, self.world.groups, self.world.device)
        return Compiled(captured, program, lowered, apply_recompute(lowered.module))

    @property
    def program(self) -> Program:
        """The program of the example's mode and structure."""
        return next(iter(self._programs.values())).program

    # ------------------------------------------------------------------ calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for a call as the author defined it; sharded tensors come as DTensor.

        Raises:
            InputError: another structure, shape or constant than the model can take.
        """
        if args and kwargs:
            raise InputError("mixes positional and keyword arguments", where="call", remedy="use one of them")
        batch: Any = kwargs if kwargs else args
        return self._call(self._compiled(batch, False), batch)

    def train_step(self, batch: Any) -> Tensor:
        """Forward and backward of one batch; gradients are added to `.grad`. Returns the loss, detached.

        Raises:
            InputError: the model has no loss, or the module is in evaluation mode.
        """
        if not self.training:
            raise InputError("the module is in evaluation mode", where="train_step", remedy="call train() before")
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        compiled = self._compiled(batch, True)
        if not compiled.program.loss:
            raise InputError(
                "the model returns no loss", where="train_step", remedy="pass labels, or parallelize(…, loss=…)"
            )
        outputs = self._outputs(compiled, batch)
        loss = outputs[compiled.program.loss]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _call(self, compiled: Compiled, batch: Any) -> Any:
        outputs = self._outputs(compiled, batch)
        nodes = compiled.program.output_nodes()
        leaves = [
            self._returned(outputs[str(what)], output_layouts(nodes[str(what)])[0]) if kind == "output" else what
            for kind, what in compiled.captured.spec.out_leaves
        ]
        return pytree.tree_unflatten(leaves, compiled.captured.spec.out_spec)

    def _returned(self, value: Tensor, layout: Layout) -> Any:
        cut = {axis: placement for axis, placement in layout if placement.is_shard}
        if not cut:
            return value
        mesh = DeviceMesh.from_group(self.world.process_group("tp"), self.world.device.type)
        placements = [Shard(cut[a].dim) if a in cut else Replicate() for a in self.plan.axes]
        return DTensor.from_local(value, mesh, placements, run_check=False)

    def _outputs(self, compiled: Compiled, batch: Any) -> dict[str, Tensor]:
        program = compiled.program
        inputs = self._inputs(compiled, batch)
        tensors = {**dict(self.named_buffers()), **dict(self.named_parameters())}
        values: dict[str, Tensor] = {}
        for parameter in program.parameters:
            constant = parameter.kind == "constant"
            source = program.constants[parameter.fqn].to(self.world.device) if constant else tensors[parameter.fqn]
            values[parameter.node] = source
        for entry in program.inputs:
            values[entry.node] = self._random_state() if entry.path == RNG_PATH else inputs[entry.path]
        ranks = [torch.tensor(self.world.coordinates[a], device=self.world.device) for a in compiled.lowered.indices]
        results = compiled.run(*[values[name] for name in compiled.lowered.inputs], *ranks)
        return dict(zip(program.outputs, results, strict=True))

    def _random_state(self) -> Tensor:
        """Seed, step and microbatch; each call in training mode is a step of its own."""
        self._step += 1
        return torch.tensor([self.plan.seed, self._step - 1, 0], dtype=torch.int64, device=self.world.device)

    def _inputs(self, compiled: Compiled, batch: Any) -> dict[str, Tensor]:
        with_loss = compiled.captured.loss is not None
        call: Any = ((batch,), {}) if with_loss else arguments(_Signature(self._skeleton[0]), batch, False)  # type: ignore[arg-type]
        leaves, _ = pytree.tree_flatten(call)
        given: dict[str, Tensor] = {}
        for (kind, what), value in zip(compiled.captured.spec.in_leaves, leaves, strict=True):
            if kind == "input":
                given[str(what)] = value.to(self.world.device)
        _check_shapes(compiled.program, given)
        return given

    # ------------------------------------------------------------------ state

    def full_state_dict(self) -> dict[str, Tensor]:
        """What `state_dict()` of the unsplit model would hold, on the CPU of every rank. All ranks must call it."""
        return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the unsplit model's state dict; each rank keeps its shards. Tied names may be left out.

        Raises:
            CheckpointError: a name is missing or unknown, or a shape differs; nothing is loaded then.
        """
        load_full_state_dict(self, state)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

        Every logical parameter counts once (SPEC section 2.5). All ranks must call it.
        """
        return clip_grad_norm_(self, max_norm)

    # ------------------------------------------------------------------ refusals

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: generation needs caches."""
        raise InputError("is not supported", where="generate()", remedy="gather full_state_dict() into the plain model")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a dict of one rank's shards under the author's names would be taken for the whole."""
        raise InputError("would hold one rank's shards", where="state_dict()", remedy="use full_state_dict()")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see `state_dict`."""
        raise InputError("would take one rank's shards", where="load_state_dict()", remedy="use load_full_state_dict()")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InputError("cannot be copied", where="ParallelModule", remedy="call parallelize on a copy of the model")


class _Signature:
    """Stands for a model where only the signature of its forward is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = model.forward


def _at_least_two(value: Tensor) -> Tensor:
    """Tracing freezes sizes of one: an example of one sample is traced with two."""
    return torch.cat([value, value]) if value.dim() and value.shape[0] == 1 else value


def _parameter_layouts(program: Program) -> dict[str, Layout]:
    return {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}


def _attach(root: nn.Module, name: str, register: Callable[[nn.Module, str], None]) -> None:
    """Registers under a dotted name, making the modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    register(root, leaf)


def _skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors have shapes and no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _check_shapes(program: Program, inputs: Mapping[str, Tensor]) -> None:
    """Symbols have one value each, other sizes are the traced ones."""
    values: dict[str, tuple[int, str]] = {}
    for entry in _user_inputs(program):
        tensor = inputs[entry.path]
        wanted = entry.type.shape
        if tensor.dtype != entry.type.dtype or tensor.dim() != len(wanted):
            raise InputError(
                f"is {tensor.dtype} with {tensor.dim()} dimensions, the program takes {entry.type}", where=entry.path
            )
        for dim, size in enumerate(wanted):
            found = tensor.shape[dim]
            if isinstance(size, int):
                if found != size:
                    raise InputError(f"has size {found} in dimension {dim}, the model was traced with {size}", where=entry.path)
                continue
            known = values.setdefault(str(size), (found, f"{entry.path} dimension {dim}"))
            if size.is_Symbol and known[0] != found:
                raise InputError(
                    f"has size {found} in dimension {dim} and {known[1]} has {known[0]}; the example had equal sizes",
                    where=entry.path,
                    remedy="pass equal sizes, or an example in which they differ",
                )


def _user_inputs(program: Program) -> Iterator[Any]:
    return (entry for entry in program.inputs if entry.path != RNG_PATH)

