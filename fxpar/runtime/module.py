"""The parallel module: one rank's part of a model, which trains, evaluates and saves under the author's names.

Enters: a model, its plan and the processes. Leaves: `ParallelModule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.layout import Layout
from fxpar.manager import Pass
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.plan import Plan
from fxpar.program import PRECISION_DTYPES, Program
from fxpar.report import Report, make_report
from fxpar.runtime import batch as calls
from fxpar.runtime import distributed_state
from fxpar.runtime.adopt import adopt, load
from fxpar.runtime.agreement import together
from fxpar.runtime.checkpoint import Checkpoint
from fxpar.runtime.execution import own_generator
from fxpar.runtime.export import save_checkpoint
from fxpar.runtime.outputs import returned
from fxpar.runtime.programs import Call, Programs
from fxpar.runtime.state import clip_grad_norm_, fingerprints, full_state_dict, load_full_state_dict
from fxpar.runtime.world import World


class ParallelModule(nn.Module):
    """One rank's part of a model. Made by `fxpar.parallelize`.

    Parameters are this rank's shards under the author's names. Programs are compiled on first use for each mode of the
    modules (training, evaluation), each structure of the batch, and sizes for which the model takes other branches;
    sizes of one, for example a batch of one sample, have programs of their own.

    Attributes:
        plan: how the model is split.
        world: the processes.
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
        self._loss, self._check_inputs = loss, check_inputs
        self._shapes = {n: tuple(t.shape) for n, t in _tensors(model, everything=True).items()}
        self._programs = Programs(model, self, plan, world, loss, passes)
        self._programs.start(calls.canonical(example), fingerprints(model))
        with torch.device("cpu"):  # and not that of a context in which the model was built
            self.loading = adopt(self, model, PRECISION_DTYPES[plan.precision], checkpoint)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each parameter, buffer and constant by its first name."""
        return self._programs.layouts

    # ------------------------------------------------------------------ weights

    def layout_of(self, name: str) -> Layout:
        """Layout of a parameter or buffer under any of its names; empty for those that no program uses."""
        return self.layouts.get(self._programs.aliases.get(name, name), Layout())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Whole shape of a parameter or buffer of the unsplit model."""
        return self._shapes[name]

    # ------------------------------------------------------------------ calls

    @property
    def program(self) -> Program:
        """The program of the example's mode and structure."""
        return self._programs.first.program

    def _bound(self, batch: Any, with_loss: bool) -> Call:
        if self._check_inputs:
            self.world.agreement.compare(self._programs.facts(batch, values=True), self.world.device)
        return self._programs.bound(batch, with_loss)

    @together
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for a call as the author defined it; sharded tensors come as DTensor.

        Raises:
            InputError: an argument that the model's forward does not take, or a value that no program can.
        """
        call = self._bound(calls.called_with(self._programs.skeleton, args, kwargs), False)
        outputs = self._outputs(call, tuple(call.compiled.program.outputs))
        return returned(call, outputs, self.world)

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

    def _outputs(self, call: Call, wanted: tuple[str, ...]) -> dict[str, Tensor]:
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
        save_checkpoint(self, self._programs.skeleton, folder, shard_size)

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
        compiled = self._programs.first
        given: dict[str, Any] = {"device": self.world.device, "sizes": sizes, "optimizer": optimizer}
        return make_report(compiled.program, compiled.lowered, name=type(self._programs.skeleton).__name__, **given)

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
