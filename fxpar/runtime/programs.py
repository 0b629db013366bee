"""The programs of a module: one for each mode, structure of the batch, and sizes that need one of their own.

Enters: a model, its plan, and calls. Leaves: for each call the program that fits, compiled where there is none yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture import Captured, arguments
from fxpar.capture.precision import in_precision
from fxpar.compile import compile_model, lower_program
from fxpar.errors import InputError
from fxpar.layout.layout import Layout
from fxpar.manager import Pass
from fxpar.ops.deferred import Reduction
from fxpar.ops.lower import Lowered
from fxpar.passes.annotate import annotate, keeping
from fxpar.passes.divide_batch import of_all_ranks
from fxpar.plan.plan import Plan
from fxpar.program.program import PRECISION_DTYPES, Program, TensorType, note, output_layouts
from fxpar.runtime import batch as calls
from fxpar.runtime.execution import Executor
from fxpar.runtime.refusals import Unwrappable
from fxpar.runtime.skeleton import attach, skeleton_of
from fxpar.runtime.world import World
from fxpar.text.printing import print_program
from fxpar.verify.faithful import compare, compare_filled, findings


@dataclass(frozen=True)
class Compiled:
    """A program for one mode and one structure of the batch, ready to run.

    Attributes:
        run: runs it; `local` leaves the parameters' gradients as this rank has them, and `reductions` sum them.
        constants: the program's constants on the device.
        indices: the rank's index on each axis, on the device.
        admitted: sizes at which the trace is known to be the model.
    """

    captured: Captured
    program: Program
    lowered: Lowered
    run: Executor
    local: Executor
    reductions: tuple[Reduction, ...]
    constants: Mapping[str, Tensor]
    indices: tuple[Tensor, ...]
    admitted: set[tuple[int, ...]] = field(default_factory=set)

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether the program is the model for inputs of these sizes."""
        key = tuple(sizes.values())
        if key not in self.admitted and self.captured.spec.admits(sizes):
            self.admitted.add(key)
        return key in self.admitted


@dataclass(frozen=True)
class Call:
    """A batch bound to its program: inputs by path on the device, and the values of the symbols."""

    compiled: Compiled
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, int]


class Programs:
    """What a parallel module runs.

    Attributes:
        skeleton: the model without memory, which is captured.
        layouts: layout of each parameter, buffer and constant by its first name, as the first program has them.
        aliases: other names of tied parameters, and the first one of each.
    """

    def __init__(
        self,
        model: nn.Module,
        root: Unwrappable,
        plan: Plan,
        world: World,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
    ) -> None:
        """Gives `root` empty modules under the names of the model's, whose modes decide which program runs."""
        self.skeleton = skeleton_of(model, PRECISION_DTYPES[plan.precision])
        self.layouts: dict[str, Layout] = {}
        self.aliases: dict[str, str] = {}
        self._plan, self._world, self._loss, self._passes = plan, world, loss, tuple(passes)
        self._twins = ((self.skeleton, root), *attach(root, self.skeleton))
        self._known: dict[Any, list[Compiled]] = {}

    def start(self, model: nn.Module, example: Any, facts: Mapping[str, str]) -> None:
        """Compiles the first program, with whose layouts all others must do.

        Args:
            model: the author's, which rank 0 compares with what is captured.
            facts: what else must be the same on all ranks.

        Raises:
            InputError: the model cannot be split, or the ranks differ.
        """
        with_loss = callable(self._loss)
        first = self._compile(example, with_loss, self._loss, model)
        everything = {**self.facts(example, values=False), **facts, "the program": _digest(first)}
        remedy = "build the model alike on every rank: seed it, or load one checkpoint"
        self._world.agreement.agree(everything, remedy)
        self.layouts = _parameter_layouts(first.program)
        self.aliases = {other: p.fqn for p in first.program.parameters for other in p.tied}
        self._known[self._key(example, with_loss)] = [first]

    @property
    def first(self) -> Compiled:
        """That of the example's mode and structure."""
        return next(iter(self._known.values()))[0]

    def __iter__(self) -> Iterator[Compiled]:
        """All that are compiled."""
        return (compiled for known in self._known.values() for compiled in known)

    def bound(self, batch: Any, with_loss: bool) -> Call:
        """The program for a call; it is compiled where none fits, on all ranks or on none.

        Raises:
            InputError: the batch does not fit the model, or the ranks make other calls.
        """
        calls.check(self.skeleton, batch, with_loss)
        known = self._known.setdefault(self._key(batch, with_loss), [])
        for compiled in known:
            call = self._fit(compiled, batch)
            if call is not None:
                return call
        compiled = self._compile(batch, with_loss)
        facts = {**self.facts(batch, values=False), "the program": _digest(compiled)}
        self._world.agreement.agree(facts, "make the same calls on every rank, with batches of the same sizes")
        known.append(compiled)
        call = self._fit(compiled, batch)
        assert call is not None, "a program does not fit the batch it was compiled for"
        return call

    def facts(self, batch: Any, values: bool) -> dict[str, str]:
        """What must be the same on all ranks in a call."""
        modes = [own.training for _, own in self._twins]
        mode = "training" if all(modes) else f"modules in training {modes}" if any(modes) else "evaluation"
        return {"the call": self._world.agreement.what, "the mode": mode, **calls.batch_facts(batch, values)}

    def _key(self, batch: Any, with_loss: bool) -> Any:
        return tuple(own.training for _, own in self._twins), with_loss, calls.structure(batch)

    def _fit(self, compiled: Compiled, batch: Any) -> Call | None:
        """The call by a program; None where the program is for other sizes."""
        spec = compiled.captured.spec
        nest = ((batch,), {}) if compiled.captured.loss is not None else arguments(self.skeleton, batch, False)
        inputs = calls.bind(spec, nest, self._world.device)
        sizes = calls.sizes_of(compiled.program, inputs)
        return None if sizes is None or not compiled.admits(sizes.given) else Call(compiled, inputs, sizes.shares)

    def _compile(self, batch: Any, with_loss: bool, loss: Any = "", model: nn.Module | None = None) -> Compiled:
        """Captures and splits the model for a batch; with an empty loss, the loss is what is there of it.

        Args:
            model: with values, where it is at hand.
        """
        calls.check(self.skeleton, batch, with_loss)
        for ghost, own in self._twins:
            ghost.training = own.training
        passes = [keeping(self.layouts) if self.layouts and item is annotate else item for item in self._passes]

        def review(captured: Captured) -> Captured:
            if not with_loss:
                calls.check_use(self.skeleton, captured.program)
                captured = replace(captured, program=captured.program.with_(loss=self._loss_name(captured.program)))
            captured = replace(captured, findings=findings(captured, self._compared(captured, batch, model)))
            return replace(captured, program=of_all_ranks(captured.program))

        asked = self._loss if with_loss else loss
        compiled = compile_model(self.skeleton, calls.example(batch), self._plan, asked, passes, review)
        program = compiled.program
        layouts = _parameter_layouts(program)
        odd = [n for n, layout in layouts.items() if layout != self.layouts.get(n, layout)]
        if odd:
            raise InputError("this call would need another split", where=odd[0], remedy="call it as the example")
        device = self._world.device
        lowered = lower_program(program, self._world.groups, device)
        constants = {name: value.to(device) for name, value in program.constants.items()}
        places = self._world.coordinates
        indices = tuple(torch.tensor(places[axis], device=device) for axis in lowered.indices)
        local, reductions = lowered.without_reductions()
        runs = Executor(lowered, self._plan), Executor(local, self._plan)
        return Compiled(compiled.captured, program, lowered, *runs, reductions, constants, indices)

    def _compared(self, captured: Captured, batch: Any, model: nn.Module | None) -> str:
        """Compares a captured graph with the model, on rank 0; returns why not, where it is not."""
        is_first = self._world.rank == 0
        if model is not None:
            with in_precision(model, self._plan):
                return compare(captured, model, batch, is_first)
        buffers = dict(self._twins[0][1].named_buffers())
        return compare_filled(captured, self.skeleton, buffers, batch, is_first)

    def _loss_name(self, program: Program) -> str:
        """The output to differentiate; a plain call may be without (no labels)."""
        kinds = {name: note(node).type for name, node in program.output_nodes().items()}
        scalars = [n for n, kind in kinds.items() if isinstance(kind, TensorType) and kind.is_float and not kind.shape]
        wanted = self._loss if isinstance(self._loss, str) else "loss"
        if wanted in scalars:
            return wanted
        return scalars[0] if len(scalars) == 1 and self._loss is None else ""


def _digest(compiled: Compiled) -> str:
    return hashlib.sha256(print_program(compiled.program).encode()).hexdigest()


def _parameter_layouts(program: Program) -> dict[str, Layout]:
    return {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
