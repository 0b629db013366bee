"""The parallel module: one rank's part of a model, which trains, evaluates and saves under the author's names.

Enters: a model, its plan and the processes. Leaves: `ParallelModule`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fxpar.capture import Captured, arguments, capture
from fxpar.errors import InputError
from fxpar.layout import Layout, Placement, shard
from fxpar.manager import Pass, PassManager
from fxpar.ops import bound
from fxpar.ops.lower import Lowered, lower
from fxpar.passes.annotate import annotate, keeping
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.plan import Plan
from fxpar.program import PRECISION_DTYPES, Program, TensorType, note, output_layouts
from fxpar.report import Report, make_report
from fxpar.runtime import batch as calls
from fxpar.runtime import distributed_state
from fxpar.runtime.adopt import adopt, load
from fxpar.runtime.agreement import together
from fxpar.runtime.checkpoint import Checkpoint
from fxpar.runtime.execution import Executor, own_generator
from fxpar.runtime.export import save_checkpoint
from fxpar.runtime.skeleton import attach, skeleton_of
from fxpar.runtime.state import clip_grad_norm_, fingerprints, full_state_dict, load_full_state_dict
from fxpar.runtime.world import World
from fxpar.shards import without_padding
from fxpar.symbols import evaluate
from fxpar.text import print_program
from fxpar.verify.static import STATIC


@dataclass(frozen=True)
class Compiled:
    """A program for one mode and one structure of the batch, ready to run.

    Attributes:
        constants: the program's constants on the device.
        indices: the rank's index on each axis, on the device.
        admitted: sizes at which the trace is known to be the model.
    """

    captured: Captured
    program: Program
    lowered: Lowered
    run: Executor
    constants: Mapping[str, Tensor]
    indices: tuple[Tensor, ...]
    admitted: set[tuple[int, ...]] = field(default_factory=set)

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether the program is the model at these sizes."""
        key = tuple(sizes.values())
        if key not in self.admitted and calls.admits(self.captured.spec, self.program, sizes):
            self.admitted.add(key)
        return key in self.admitted


@dataclass(frozen=True)
class _Call:
    """A batch bound to its program: inputs by path on the device, and the values of the symbols."""

    compiled: Compiled
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, int]


class ParallelModule(nn.Module):
    """One rank's part of a model. Made by `fxpar.parallelize`.

    Parameters are this rank's shards under the author's names. Programs are compiled on first use for each mode of the
    modules (training, evaluation), each structure of the batch, and sizes for which the model takes other branches;
    sizes of one, for example a batch of one sample, have programs of their own.

    Attributes:
        plan: how the model is split.
        world: the processes.
        layouts: layout of each parameter, buffer and constant by its first name.
        saved_names: the keys of the unsplit model's state dict, in order.
        loading: memory that this rank's weights took while they were put in their places.
        step: calls so far that drew random bits; set it when a run is resumed, so that its masks go on.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: World,
        example: Any,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
        checkpoint: Checkpoint | None = None,
        check_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.world = plan, world
        self.step = 0
        # The step before which a state was drawn, that state, and what is added to it for the next one.
        self._counted: tuple[int, Tensor] = (-1, torch.empty(0))
        self._one = torch.tensor([0, 1, 0], device=world.device)
        self.saved_names = list(model.state_dict().keys())
        self.layouts: dict[str, Layout] = {}
        self._loss, self._passes, self._check_inputs = loss, tuple(passes), check_inputs
        self._programs: dict[Any, list[Compiled]] = {}
        self._shapes = {n: tuple(t.shape) for n, t in _tensors(model, everything=True).items()}
        skeleton = skeleton_of(model, PRECISION_DTYPES[plan.precision])
        self._twins = ((skeleton, self), *attach(self, skeleton))  # in a tuple: the skeletons are not children
        example = calls.canonical(example)
        first = self._compile(example, callable(loss), loss)
        facts = {**self._facts(example, values=False), **fingerprints(model), "the program": _digest(first)}
        world.agreement.agree(facts, "build the model alike on every rank: seed it, or load one checkpoint")
        self.layouts = _parameter_layouts(first.program)
        self._aliases = {other: p.fqn for p in first.program.parameters for other in p.tied}
        self.loading = adopt(self, model, PRECISION_DTYPES[plan.precision], checkpoint)
        self._programs[self._key(example, callable(loss))] = [first]

    @property
    def _skeleton(self) -> nn.Module:
        return self._twins[0][0]

    # ------------------------------------------------------------------ weights

    def layout_of(self, name: str) -> Layout:
        """Layout of a parameter or buffer under any of its names; empty for those that no program uses."""
        return self.layouts.get(self._aliases.get(name, name), Layout())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Whole shape of a parameter or buffer of the unsplit model."""
        return self._shapes[name]

    # ------------------------------------------------------------------ programs

    @property
    def program(self) -> Program:
        """The program of the example's mode and structure."""
        return next(iter(self._programs.values()))[0].program

    def _key(self, batch: Any, with_loss: bool) -> Any:
        return tuple(own.training for _, own in self._twins), with_loss, calls.structure(batch)

    def _bound(self, batch: Any, with_loss: bool) -> _Call:
        """The program for a call; it is compiled where none fits, on all ranks or on none."""
        if self._check_inputs:
            self.world.agreement.compare(self._facts(batch, values=True), self.world.device)
        calls.check(self._skeleton, batch, with_loss)
        known = self._programs.setdefault(self._key(batch, with_loss), [])
        for compiled in known:
            call = self._fit(compiled, batch)
            if call is not None:
                return call
        compiled = self._compile(batch, with_loss)
        facts = {**self._facts(batch, values=False), "the program": _digest(compiled)}
        self.world.agreement.agree(facts, "make the same calls on every rank, with batches of the same sizes")
        known.append(compiled)
        call = self._fit(compiled, batch)
        assert call is not None, "a program does not fit the batch it was compiled for"
        return call

    def _facts(self, batch: Any, values: bool) -> dict[str, str]:
        """What must be the same on all ranks in a call."""
        modes = [own.training for _, own in self._twins]
        mode = "training" if all(modes) else f"modules in training {modes}" if any(modes) else "evaluation"
        return {"the call": self.world.agreement.what, "the mode": mode, **calls.batch_facts(batch, values)}

    def _fit(self, compiled: Compiled, batch: Any) -> _Call | None:
        """The call by a program; None where the program is for other sizes."""
        spec = compiled.captured.spec
        model = self._skeleton
        nest = ((batch,), {}) if compiled.captured.loss is not None else arguments(model, batch, False)
        inputs = calls.bind(spec, nest, self.world.device)
        sizes = calls.sizes_of(compiled.program, inputs)
        return None if sizes is None or not compiled.admits(sizes) else _Call(compiled, inputs, sizes)

    def _compile(self, batch: Any, with_loss: bool, loss: Any = "") -> Compiled:
        """Captures and splits the model for a batch; with an empty loss, the loss is what is there of it."""
        calls.check(self._skeleton, batch, with_loss)
        for ghost, own in self._twins:
            ghost.training = own.training
        captured = capture(self._skeleton, calls.example(batch), self.plan, self._loss if with_loss else loss)
        if not with_loss:
            calls.check_use(self._skeleton, captured.program)
            captured = replace(captured, program=captured.program.with_(loss=self._loss_name(captured.program)))
        passes = [keeping(self.layouts) if self.layouts and item is annotate else item for item in self._passes]
        program = PassManager(passes, STATIC).run(captured.program)
        layouts = _parameter_layouts(program)
        odd = [n for n, layout in layouts.items() if layout != self.layouts.get(n, layout)]
        if odd:
            raise InputError("this call would need another split", where=odd[0], remedy="call it as the example")
        lowered = lower(program, self.world.groups, self.world.device)
        constants = {name: value.to(self.world.device) for name, value in program.constants.items()}
        indices = tuple(self._index(axis) for axis in lowered.indices)
        return Compiled(captured, program, lowered, Executor(lowered, self.plan), constants, indices)

    def _loss_name(self, program: Program) -> str:
        """The output to differentiate; a plain call may be without (no labels)."""
        kinds = {name: note(node).type for name, node in program.output_nodes().items()}
        scalars = [n for n, kind in kinds.items() if isinstance(kind, TensorType) and kind.is_float and not kind.shape]
        wanted = self._loss if isinstance(self._loss, str) else "loss"
        if wanted in scalars:
            return wanted
        return scalars[0] if len(scalars) == 1 and self._loss is None else ""

    # ------------------------------------------------------------------ calls

    @together
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for a call as the author defined it; sharded tensors come as DTensor.

        Raises:
            InputError: an argument that the model's forward does not take, or a value that no program can.
        """
        call = self._bound(calls.called_with(self._skeleton, args, kwargs), False)
        outputs = self._outputs(call, tuple(call.compiled.program.outputs))
        spec, nodes = call.compiled.captured.spec, call.compiled.program.output_nodes()
        leaves = [
            self._returned(str(what), outputs[str(what)], output_layouts(nodes[str(what)])[0], call)
            if kind == "output"
            else what
            for kind, what in spec.out_leaves
        ]
        return pytree.tree_unflatten(leaves, spec.out_spec)

    @together
    def train_step(self, batch: Any) -> Tensor:
        """Forward and backward of one batch; gradients are added to `.grad`. Returns the loss, detached.

        Raises:
            InputError: the module is in evaluation mode, gradients are off, the model has no loss, or the batch does
                not fit the model.
        """
        if not self.training:
            raise InputError("the module is in evaluation mode", where="train_step", remedy="call train() before")
        if not torch.is_grad_enabled():
            raise InputError("gradients are off", where="train_step", remedy="leave torch.no_grad()")
        call = self._bound(calls.canonical(batch), callable(self._loss))
        name = call.compiled.program.loss
        if not name:
            what = f"{self._loss!r}" if isinstance(self._loss, str) else "or more than one scalar"
            raise InputError(
                f"the model returns no loss ({what})",
                where="train_step",
                remedy="pass labels, or name the loss: parallelize(…, loss=…)",
            )
        loss = self._outputs(call, (name,))[name]
        if not loss.requires_grad:
            raise InputError(
                "no parameter that the loss reaches requires a gradient", where="train_step", remedy="unfreeze some"
            )
        loss.backward()
        return loss.detach()

    def _outputs(self, call: _Call, wanted: tuple[str, ...]) -> dict[str, Tensor]:
        compiled, program = call.compiled, call.compiled.program
        if torch.is_autocast_enabled(self.world.device.type):
            raise InputError(
                "would change the element types of the program", where="autocast", remedy="use Plan(precision=…)"
            )
        tensors = _tensors(self)
        values: dict[str, Tensor] = {}
        for parameter in program.parameters:
            value = (compiled.constants if parameter.kind == "constant" else tensors)[parameter.fqn]
            if value.requires_grad and not parameter.trainable:
                raise InputError(
                    "was frozen when the model was split, so the ranks' gradients of it would not be added",
                    where=parameter.fqn,
                    remedy="parallelize the model with it trainable, and freeze it afterwards",
                )
            values[parameter.node] = value
        for entry in program.inputs:
            values[entry.node] = self._random_state() if entry.path == RNG_PATH else call.inputs[entry.path]
        ordered = [values[name] for name in compiled.lowered.inputs]
        with own_generator(self.world, self.plan.seed, self.step) if compiled.lowered.draws else nullcontext():
            return compiled.run(tuple(call.sizes.items()), wanted, (*ordered, *compiled.indices))

    def _index(self, axis: str) -> Tensor:
        return torch.tensor(self.world.coordinates[axis], device=self.world.device)

    def _random_state(self) -> Tensor:
        """Seed, step and microbatch; each call in training mode is a step of its own.

        From one step to the next it is counted on the device: a copy from the host would wait for the device.
        """
        known, state = self._counted
        if known == self.step:
            state = state + self._one
        else:
            state = torch.tensor([self.plan.seed, self.step, 0], dtype=torch.int64, device=self.world.device)
        self.step += 1
        self._counted = (self.step, state)
        return state

    def _returned(self, name: str, value: Tensor, layout: Layout, call: _Call) -> Any:
        """A sharded output as DTensor where its shard is an even block of the dimension, else gathered."""
        placement = layout.on("tp") if "tp" in self.plan.axes else Placement("I")
        if not placement.is_shard:
            return value
        kind = note(call.compiled.program.output_nodes()[name]).type
        assert isinstance(kind, TensorType)
        if placement.is_padded or placement == shard(placement.dim, kind.shape[placement.dim]):
            # The last ranks may hold less than the first: the whole shape cannot be told from the part.
            own = without_padding(value, layout, self.plan.axes, self.world.coordinates)
            shape = torch.Size([evaluate(size, call.sizes) for size in kind.shape])
            return DTensor.from_local(
                own,
                self.world.device_mesh["tp"],
                [Shard(placement.dim)],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
        if placement.is_shared:
            raise InputError(f"the ranks hold {placement} of it", where=f"output {name}", remedy="do not return it")
        pieces = [(evaluate(p.outer, call.sizes), evaluate(p.size, call.sizes)) for p in placement.pieces]
        group = self.world.groups["tp"]
        return bound.gather(value, placement.dim, pieces, group.name, group.size, self._index("tp"))

    # ------------------------------------------------------------------ state

    @together
    def full_state_dict(self) -> dict[str, Tensor]:
        """What `state_dict()` of the unsplit model would hold, on the CPU of every rank. All ranks must call it."""
        return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the unsplit model's state dict; each rank keeps its shards. Tied names may be left out.

        Raises:
            CheckpointError: a name is missing or unknown, or a shape differs; nothing is loaded then.
        """
        load_full_state_dict(self, state)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """This rank's part under the author's names, as `torch.distributed.checkpoint` saves it and loads it in place.

        A plain even shard is a DTensor, any other a `TensorPart` of the original shape; tied names appear once.

        Raises:
            InputError: arguments, with which a module around this one would call it.
        """
        if args or kwargs:
            raise InputError(
                "is made for torch.distributed.checkpoint alone and takes no arguments",
                where="state_dict()",
                remedy="save this module by itself, not as a part of another",
            )
        return distributed_state.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Loads what `state_dict` of a module of the same plan gave.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor is another part; nothing is loaded then.
            InputError: further arguments.
        """
        if args or kwargs:
            raise InputError("takes the state dict alone", where="load_state_dict()", remedy="leave the others out")
        distributed_state.load_state_dict(self, state_dict)

    @together
    def save_checkpoint(self, folder: str | Path, shard_size: int | str = "5GB") -> None:
        """Writes safetensors under the author's names, as transformers' `from_pretrained` and `load_checkpoint` read.

        Rank 0 writes and holds one file's tensors at most. A model of transformers has its configuration written too.
        All ranks must call it.

        Args:
            folder: is made if it is not there.
            shard_size: the most bytes of tensors in a file (a larger tensor has one of its own), such as "500MB".

        Raises:
            CheckpointError: the folder holds a checkpoint already or cannot be written.
            InputError: `shard_size` is no size.
        """
        save_checkpoint(self, self._skeleton, folder, shard_size)

    @together
    def load_checkpoint(self, checkpoint: str | Path | Checkpoint) -> None:
        """Loads safetensors; each rank reads its parts. Tied names may be left out. All ranks must call it.

        Args:
            checkpoint: a file, an index, a folder with either, or a `fxpar.Checkpoint`.

        Raises:
            CheckpointError: it cannot be read, or has other names or shapes; nothing is loaded then.
        """
        load(self, checkpoint)

    @together
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

        Every logical parameter counts once (SPEC section 2.5). All ranks must call it.
        """
        return clip_grad_norm_(self, max_norm)

    def report(self, sizes: Mapping[str, int] | None = None, optimizer: str = "adamw") -> Report:
        """Passes, collectives, memory of each rank, and what is not split and why; printed, it is a table.

        Of the program of the example's mode and structure. Counted, not run: nothing communicates.

        Args:
            sizes: of the inputs by symbol (`b`, `s`); the example's where they are not given.
            optimizer: adamw, sgd, sgd-momentum or none.

        Raises:
            InputError: an unknown optimizer or symbol, or a size that the ranks cannot share out.
        """
        compiled = next(iter(self._programs.values()))[0]
        given: dict[str, Any] = {"device": self.world.device, "sizes": sizes, "optimizer": optimizer}
        return make_report(compiled.program, compiled.lowered, name=type(self._skeleton).__name__, **given)

    # ------------------------------------------------------------------ refusals

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: generation needs caches."""
        raise InputError("is not supported", where="generate()", remedy="load full_state_dict() into the plain model")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError(
            "cannot be moved or cast: its programs are compiled for one device and element type",
            where="ParallelModule",
            remedy="set Plan(precision=…); the device is the process group's",
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InputError("cannot be copied", where="ParallelModule", remedy="call parallelize on a copy of the model")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError("cannot be copied or pickled", where="ParallelModule", remedy="save full_state_dict()")


def _tensors(module: nn.Module, everything: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers by name; with `everything` under all their names."""
    return {
        **dict(module.named_buffers(remove_duplicate=not everything)),
        **dict(module.named_parameters(remove_duplicate=not everything)),
    }


def _digest(compiled: Compiled) -> str:
    return hashlib.sha256(print_program(compiled.program).encode()).hexdigest()


def _parameter_layouts(program: Program) -> dict[str, Layout]:
    return {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
