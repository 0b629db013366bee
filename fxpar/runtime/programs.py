"""The programs of a module: one for each mode, structure of the batch, and sizes that need one of their own.

Enters: a model, its plan, and calls. Leaves: for each call the program that fits, compiled where there is none yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.capture import Captured, arguments
from fxpar.capture.prepared_model import cast_inputs, in_precision, input_dtype, skeleton_of
from fxpar.compile import compile_model, compile_program
from fxpar.errors import FxparError, InputError
from fxpar.ir.program import PRECISION_DTYPES, Input, Program, TensorType, note, output_layouts
from fxpar.ir.stages import holders
from fxpar.ir.step import batch_symbol
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import names, shape_text
from fxpar.manager import Pass
from fxpar.mesh.axes import Cuts, axis_that
from fxpar.passes import insert_collectives
from fxpar.passes.annotate import annotate, keeping
from fxpar.passes.divide_batch import of_all_ranks
from fxpar.passes.partition_stages import holding, partition_stages
from fxpar.pipeline.compiler.builtin_schedules import local_stages, rank_of, schedule_of
from fxpar.plan.plan import Plan
from fxpar.runtime import batch as calls
from fxpar.runtime.bound_batch import BoundBatch, Compiled
from fxpar.runtime.graph_modes import NoGraphs
from fxpar.runtime.rank_batches import Shapes, fit_batch, largest
from fxpar.runtime.steps import PeerMemory, Steps
from fxpar.runtime.world import World
from fxpar.text.printing import print_program
from fxpar.verify.faithful import compare, compare_filled, findings

_TRAINING = attrgetter("training")


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
        plan: Plan,
        world: World,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
        graphs: NoGraphs,
        peer_memory: PeerMemory,
    ) -> None:
        self.skeleton = skeleton_of(model, PRECISION_DTYPES[plan.precision])
        self.layouts: dict[str, Layout] = {}
        self.aliases: dict[str, str] = {}
        self._plan, self._world, self._loss, self._passes = plan, world, loss, tuple(passes)
        self._graphs, self._local_stages, self._peer_memory = graphs, local_stages(plan, world.place), peer_memory
        self._splits = plan.pp > 1 and schedule_of(plan, plan.microbatches).schedule.split_backward
        self._modules = [*self.skeleton.modules()]
        self._twins: tuple[tuple[nn.Module, nn.Module], ...] = ()
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
        # The text has no rank or address, so equal programs have equal digests. Ranks with different programs would
        # hang in the first collective that only some of them have.
        everything = {**self.facts(example), **facts, "the program": _digest(first)}
        remedy = "build the model alike on every rank: seed it, or load one checkpoint"
        self._world.agreement.agree(everything, remedy)
        # What the first program has left to loads decided is for all others too.
        self._plan = self._plan.with_slots_of(first.program.plan)
        self.layouts = _parameter_layouts(first.program)
        self.aliases = {other: p.fqn for p in first.program.parameters for other in p.tied}
        self._known[self._key(example, with_loss)] = [first]

    def follow(self, root: nn.Module) -> None:
        """Lets the modes of the modules in `root`, which are as the skeleton's, decide which program runs."""
        self._modules = [*root.modules()]
        self._twins = tuple(zip(self.skeleton.modules(), self._modules, strict=True))

    @cached_property
    def foreign(self) -> frozenset[str]:
        """Returns names of the parameters that other ranks of the pipeline hold, and this one does not."""
        local = set(self._local_stages)
        return frozenset(name for name, stages in self.stages_by_parameter.items() if local.isdisjoint(stages))

    @cached_property
    def stages_by_parameter(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the stages of a pipeline that hold each parameter, by its name; nothing without one."""
        if not self._local_stages:
            return {}
        stages_by_name, kinds = holders(self.first.program), {p.fqn: p.kind for p in self.first.program.parameters}
        return {name: stages for name, stages in stages_by_name.items() if kinds[name] == "parameter"}

    @property
    def places(self) -> dict[str, frozenset[int]]:
        """Returns the ranks of the pipeline, by place, that hold each parameter; nothing without one."""
        order = rank_of(self._plan) if self._local_stages else ()
        return {name: frozenset(order[s] for s in stages) for name, stages in self.stages_by_parameter.items()}

    @property
    def first(self) -> Compiled:
        """Returns the program of the example's mode and structure."""
        return next(iter(self._known.values()))[0]

    @cached_property
    def without_rows(self) -> frozenset[str]:
        """Returns paths of the first program's inputs that are the same on all data ranks, and none of whose sizes
        varies."""
        program, axes = self.first.program, self._plan.axes_for(Cuts.BATCH)
        paths = set[str]()
        for entry in calls.user_inputs(program):
            (layout,) = output_layouts(program.node(entry.node))
            varies = names(entry.type.shape) or has_fixed(entry, self.first.captured.fixed)
            if not varies and not any(axis in axes and placement.is_shard for axis, placement in layout):
                paths.add(entry.path)
        return frozenset(paths)

    def __iter__(self) -> Iterator[Compiled]:
        """Yields all that are compiled."""
        return (compiled for known in self._known.values() for compiled in known)

    @property
    def of_sizes(self) -> tuple[str, ...]:
        """Returns the sizes of each program, of modes and structures with several, or with one for some sizes alone."""
        texts = []
        for programs in self._known.values():
            # A single program for all sizes is the normal case, of which a report has nothing to say.
            is_one = len(programs) == 1 and not programs[0].captured.fixed and not programs[0].program.conditions
            texts += [] if is_one else [sizes_text(compiled.program) for compiled in programs]
        return tuple(texts)

    def bound(
        self,
        batch: Any,
        with_loss: bool,
        shapes: Shapes | None = None,
        differentiated: bool = True,
    ) -> BoundBatch:
        """Returns the program for a call; it is compiled where none fits, on all ranks or on none.

        Args:
            shapes: those of all data ranks' batches, where they differ.
            differentiated: whether the call may be: its program is for sizes of which PyTorch has a derivative.

        Raises:
            InputError: the batch does not fit the model, or the ranks make other calls, or batches that no program
                takes together.
        """
        if shapes is None:
            return self._bound(batch, with_loss, differentiated)
        compiled = self._bound(largest(batch, shapes), with_loss, differentiated).compiled
        fitted = fit_batch(compiled, batch, shapes, self._world)
        inputs = self._inputs(compiled, fitted.batch)
        sizes = calls.sizes_of(compiled.program, inputs)
        assert sizes is not None, "a program does not fit a batch that was made to fit"
        if fitted.rows:
            sizes.totals[batch_symbol(compiled.program)] = sum(fitted.rows)
        if not compiled.admits(sizes.totals):
            _refuse_branch(sizes.totals)
        call = BoundBatch(compiled, compiled.ready, inputs, sizes.shares, compiled.indices, sizes.totals)
        if fitted.fills is not None:
            call = replace(call, fills=self._inputs(compiled, fitted.fills), unproven=fitted.unproven)
        if not fitted.rows:
            return call
        if not compiled.uneven:
            compiled.uneven.append(self._ready(compiled.program, uneven_rows=True))
        return replace(call, ready=compiled.uneven[0], places=(*compiled.indices, *fitted.places), rows=fitted.rows)

    def _bound(self, batch: Any, with_loss: bool, differentiated: bool) -> BoundBatch:
        calls.check(self.skeleton, batch, with_loss)
        known = self._known.setdefault(self._key(batch, with_loss), [])
        for compiled in known:
            call = self._fit(compiled, batch)
            if call is not None and (not differentiated or compiled.is_differentiable):
                return call
        entries = ", ".join(f"{name}: {text}" for name, text in calls.batch_facts(batch, False, True).items())
        # Whether a program is known depends on shapes that may differ by rank. Meeting first turns a rank that compiles
        # while the others compute into an error, instead of a wait.
        self._world.agreement.meet("compiles a program", more=f" for {entries}")
        check_count(known, batch, self._plan.size_programs)
        fixed = fixed_sizes(known, batch) if differentiated else frozenset()
        compiled = self._compile(batch, with_loss, differentiated=differentiated, fixed=fixed)
        facts = {**self.facts(batch), "the program": _digest(compiled)}
        self._world.agreement.agree(facts, "make the same calls on every rank, with batches of the same sizes")
        known.append(compiled)
        call = self._fit(compiled, batch)
        if call is None:  # a rank traces its own rows, and the branches of the model go by those of all
            sizes = calls.sizes_of(compiled.program, self._inputs(compiled, batch))
            _refuse_branch({} if sizes is None else sizes.totals)
        return call

    def with_all_places(self, call: BoundBatch) -> BoundBatch:
        """Returns a call whose buffers have as many places as rows may need; without a budget it is the call itself."""
        if self._plan.experts.recv_capacity_factor is None:
            return call
        compiled = call.compiled
        if not compiled.spare:
            program = compiled.captured.program
            plan = compiled.program.plan  # with what was left to cost decided
            plan = replace(plan, experts=replace(plan.experts, recv_capacity_factor=None))
            with keeping(self.layouts):
                program = compile_program(program.with_(plan=plan), self._further_passes())
            self._check_choice(program)
            compiled.spare.append(replace(compiled, program=program, ready=self._ready(program), spare=[]))
        spare = compiled.spare[0]
        return replace(call, compiled=spare, ready=spare.ready)

    def facts(self, batch: Any, sizes: bool = True) -> dict[str, str]:
        """Returns what must be the same on all ranks in a call; the sizes of the batch are part of it, or are not."""
        modes = self._modes
        mode = "training" if all(modes) else f"modules in training {modes}" if any(modes) else "evaluation"
        if self._local_stages:  # with a pipeline a call is differentiated on all ranks or on none
            mode += f", gradients {'on' if torch.is_grad_enabled() else 'off'}"
        return {"the call": self._world.agreement.what, "the mode": mode, **calls.batch_facts(batch, False, sizes)}

    def _key(self, batch: Any, with_loss: bool) -> Any:
        return self._modes, with_loss, calls.structure(batch)

    @property
    def _modes(self) -> tuple[bool, ...]:
        return tuple(map(_TRAINING, self._modules))

    def _fit(self, compiled: Compiled, batch: Any) -> BoundBatch | None:
        """Returns the call by a program; None where the program is for other sizes."""
        inputs = self._inputs(compiled, batch)
        sizes = calls.sizes_of(compiled.program, inputs)
        if sizes is None or not compiled.admits(sizes.totals):
            return None
        return BoundBatch(compiled, compiled.ready, inputs, sizes.shares, compiled.indices, sizes.totals)

    def _inputs(self, compiled: Compiled, batch: Any) -> dict[str, Tensor]:
        spec = compiled.captured.spec
        nest: Any = ((batch,), {})
        if compiled.captured.loss is None:
            nest = cast_inputs(arguments(self.skeleton, batch, False), input_dtype(self._plan))
        return calls.bind(spec, nest, self._world.device)

    def _compile(
        self, batch: Any, with_loss: bool, loss: Any = "", model: nn.Module | None = None, **options: Any
    ) -> Compiled:
        """Leaves inference mode for `_compile_outside`: what is made in it can neither be traced nor differentiated."""
        if not torch.is_inference_mode_enabled():
            return self._compile_outside(batch, with_loss, loss, model, **options)
        with torch.inference_mode(False):
            batch = pytree.tree_map_only(Tensor, torch.clone, batch)
            return self._compile_outside(batch, with_loss, loss, model, **options)

    def _compile_outside(
        self,
        batch: Any,
        with_loss: bool,
        loss: Any,
        model: nn.Module | None,
        *,
        differentiated: bool = True,
        fixed: frozenset[tuple[int, int]] = frozenset(),
    ) -> Compiled:
        """Captures and splits the model for a batch; with an empty loss, the loss is what is there of it.

        Args:
            model: with values, where it is at hand.
            differentiated: as for `bound`.
            fixed: as for `compile_model`.
        """
        calls.check(self.skeleton, batch, with_loss)
        for skeleton, module in self._twins:
            skeleton.training = module.training

        def review(captured: Captured) -> Captured:
            if not with_loss:
                calls.check_use(self.skeleton, captured.program)
                captured = replace(captured, program=captured.program.with_(loss=self._loss_name(captured.program)))
            compared = self._compared(captured, batch, model)
            captured = replace(captured, findings=findings(captured.how, captured.unwalked, compared))
            return replace(captured, program=of_all_ranks(captured.program))

        chosen_loss = self._loss if with_loss else loss
        options: dict[str, Any] = {"differentiated": differentiated, "fixed": fixed}
        passes = self._further_passes() if self.layouts else [*self._passes]
        with keeping(self.layouts):
            compiled = compile_model(
                self.skeleton, calls.example(batch), self._plan, chosen_loss, passes, review, **options
            )
        if not self.layouts and self._plan.microbatches > 1 and self._plan.dp == 1:
            prove_rows(compiled.captured.program, self._passes)
        program = compiled.program
        if self.layouts:
            self._check_choice(program)
        device = self._world.device
        ready = self._ready(program)
        constants = {name: value.to(device) for name, value in program.constants.items()}
        places = self._world.coordinates
        indices = tuple(torch.tensor(places[axis], device=device) for axis in ready.lowered.indices)
        return Compiled(compiled.captured, program, ready, constants, indices, differentiated)

    def _further_passes(self) -> list[Pass]:
        """Returns the passes of a further program, whose parameters stay on their stages."""
        if not self._local_stages:
            return [*self._passes]
        held_stages = holding(self.stages_by_parameter)
        return [held_stages if item is partition_stages else item for item in self._passes]

    def _check_choice(self, program: Program) -> None:
        """Refuses a further program for which a pass has chosen anew where the module's parameters lie.

        `annotate` keeps the layouts of the module, wrapped or not; what stands in its place may not.

        Raises:
            InputError: names the parameter and the pass.
        """
        for name, layout in _parameter_layouts(program).items():
            if layout != self.layouts.get(name, layout):
                chosen, needed = (str(entry) or "no cut" for entry in (layout, self.layouts[name]))
                self._refuse_choice(annotate, name, f"the layout {chosen}", needed)
        for name, stages in holders(program).items() if self._local_stages else ():
            if not {*stages} <= {*self.stages_by_parameter.get(name, stages)}:
                needed = f"stages {self.stages_by_parameter[name]}"
                self._refuse_choice(partition_stages, name, f"stages {stages}", needed)

    def _refuse_choice(self, keeper: Pass, name: str, choice: str, needed: str) -> NoReturn:
        deciding = next(item.name for item in self._passes if keeper.provides & item.provides)
        raise InputError(
            f"the pass '{deciding}' gives it {choice} in this call's program, and the module has it in {needed}",
            where=name,
            remedy=f"have it call `{keeper.name}`, which keeps what the module has, or call the module as the example",
        )

    def _ready(self, program: Program, uneven_rows: bool = False) -> Steps:
        return Steps(
            program,
            self._world.groups,
            self._world.device,
            self._plan,
            uneven_rows,
            self._graphs,
            self._local_stages,
            self._splits,
            peer_memory=self._peer_memory,
            enter=self._world.agreement.enter,
        )

    def _compared(self, captured: Captured, batch: Any, model: nn.Module | None) -> str:
        """Compares a captured graph with the model, on rank 0; returns why not, where it is not."""
        is_first = self._world.rank == 0
        if model is not None:
            with in_precision(model, self._plan):
                return compare(captured, model, batch, is_first)
        # The author's model is not kept. Weights are drawn for this comparison, while
        # buffers such as rotary tables are the module's.
        buffers = dict(self._twins[0][1].named_buffers())
        return compare_filled(captured, self.skeleton, buffers, batch, is_first)

    def _loss_name(self, program: Program) -> str:
        """Returns the output to differentiate; a plain call may be without (no labels)."""
        kinds = {name: note(node).type for name, node in program.output_nodes().items()}
        scalars = [n for n, kind in kinds.items() if isinstance(kind, TensorType) and kind.is_float and not kind.shape]
        preferred = self._loss if isinstance(self._loss, str) else "loss"
        if preferred in scalars:
            return preferred
        return scalars[0] if len(scalars) == 1 and self._loss is None else ""


def _refuse_branch(sizes: Mapping[str, int]) -> NoReturn:
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    raise InputError(
        f"the model takes another branch for the rows of all data ranks ({text}) than for those of one",
        where="batch",
        remedy=f"write the model without a branch on the number of rows, or set {axis_that(Cuts.BATCH)}=1",
    )


def _digest(compiled: Compiled) -> str:
    return hashlib.sha256(print_program(compiled.program).encode()).hexdigest()


def _parameter_layouts(program: Program) -> dict[str, Layout]:
    return {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}


def prove_rows(program: Program, passes: Sequence[Pass]) -> None:
    """Refuses a program whose batch cannot be cut into microbatches.

    Raises:
        InputError: names what takes the rows together, or the inputs that do not say which dimension they are.
    """
    # Microbatches cut the batch as data ranks do. So two data ranks are tried in
    # their place, and all else that cuts is switched off.
    pipeline = replace(program.plan.pipeline, stages=(), group_size=None)
    plan = replace(program.plan, virtual_stages=1, pipeline=pipeline, microbatches=1, schedule="")
    plan = replace(plan, loss_reduction="mean", tp=1, dp=2, pp=1, split={}, sequence_parallel=False)
    try:
        compile_program(of_all_ranks(program.copy().with_(plan=plan)), passes, until=insert_collectives.name)
    except FxparError as error:
        raise InputError(
            f"nothing proves which rows a microbatch may have: {error.where}: {error.reason}",
            where="microbatches",
            remedy="say which dimension of each input is the rows (batch_dims={path: dim}), or set microbatches=1 and "
            "pass train_step a list of microbatches",
        ) from error


# Programs that are for sizes of their own: which sizes a further one has as numbers, and how many there may be.


def has_fixed(entry: Input, fixed: frozenset[tuple[int, int]]) -> bool:
    """Returns whether one of the sizes of an input is a number because PyTorch differentiates for that one alone.

    Args:
        fixed: as of `Captured`.
    """
    return any((dim, size) in fixed for dim, size in enumerate(entry.type.shape) if isinstance(size, int))


def fixed_sizes(known: Sequence[Compiled], batch: Any) -> frozenset[tuple[int, int]]:
    """Returns the sizes of a batch in the dimensions that are numbers in other programs: it is not tried whether they
    need be.

    Args:
        known: the other programs.
    """
    shapes = {path: value.shape for path, value in calls.leaves(batch) if isinstance(value, Tensor)}
    fixed = set()
    for compiled in known:
        for entry in calls.user_inputs(compiled.program):
            for dim, size in enumerate(entry.type.shape):
                if isinstance(size, int) and (dim, size) in compiled.captured.fixed and entry.path in shapes:
                    fixed.add((dim, shapes[entry.path][dim]))
    return frozenset(fixed)


def sizes_text(program: Program) -> str:
    """Returns the sizes that a program is for: `ids [b, 16], s >= 5`."""
    shown = [f"{entry.path} {shape_text(entry.type.shape)}" for entry in calls.user_inputs(program)]
    return ", ".join([*shown, *map(str, program.conditions)])


def check_count(known: Sequence[Compiled], batch: Any, most: int) -> None:
    """Refuses a further program where there are as many as the plan allows.

    Raises:
        InputError: names the sizes of the batch and those of the programs.
    """
    if len(known) < most:
        return
    sizes = [f"{path} {list(v.shape)}" for path, v in calls.leaves(batch) if isinstance(v, Tensor)]
    listed = "; ".join(sizes_text(compiled.program) for compiled in known)
    raise InputError(
        f"needs a program for sizes of its own ({', '.join(sizes)}), and there are {most} already: {listed}",
        where="batch",
        remedy=f"pad batches to at most {most} lengths, or raise Plan(size_programs={most})",
    )
