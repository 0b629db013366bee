"""The plan: what the user asks of the compiler.

Enters: options, flags or a YAML file. Leaves: a frozen, self-checked `Plan`. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fxpar.errors import PlanError, shorter, shown
from fxpar.mesh.axes import DENSE, PURPOSES, Cuts
from fxpar.mesh.mesh import Mesh
from fxpar.plan.cost import Cost
from fxpar.plan.plan_options import (
    MOST_RANKS,
    Communication,
    CudaGraphs,
    Experts,
    Operators,
    OptionGroup,
    Pipeline,
    Recompute,
    by_path,
    check_known,
    fault,
    frozen,
    group,
    plain_changes,
    read_mapping,
    wrong_count,
    wrong_switch,
    wrong_word,
)

SPLITS = ("column", "row", "head", "vocab", "replicate")
LOSS_REDUCTIONS = ("mean", "token", "local_mean", "sum")
BATCH_NORMS = ("refuse", "global")
# What of the parameters and of what an optimizer keeps for them data ranks share out.
SHARDS = ("none", "optimizer", "gradients", "parameters")
PRECISIONS = ("as_is", "fp32", "bf16", "fp16", "bf16_weights")
# Options that take one of some words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    **{"loss_reduction": LOSS_REDUCTIONS, "batch_norm": BATCH_NORMS, "precision": PRECISIONS},
    "shard": SHARDS,
}
# Options that have options of their own.
GROUPS: Mapping[str, type[OptionGroup]] = {
    **{"experts": Experts, "pipeline": Pipeline, "recompute": Recompute, "communication": Communication},
    **{"operators": Operators, "cuda_graphs": CudaGraphs, "cost": Cost},
}
# Options that are mappings, which are kept sorted and cannot be written to.
_MAPPINGS = ("split", "batch_dims", "pad_values")
_AXES = ("tp", "dp", "cp", "pp", "ep", "etp")
# Schedules whose backwards are in two parts.
_SPLIT_BACKWARDS = ("zb_h1", "zbv")


@dataclass(frozen=True)
class Plan:
    """How to parallelise a model.

    Example:
        ```python
        plan = fxpar.Plan(tp=4, dp=2, sequence_parallel=True, precision="bf16")
        assert fxpar.Plan.from_yaml(plan.to_yaml()) == plan
        ```

    Attributes:
        tp: ranks that split each layer (tensor parallelism).
        dp: groups of ranks that share out the batch (data parallelism).
        pp: ranks that share out the layers, each a stage of a pipeline (pipeline parallelism).
        cp: context parallel ranks; only 1 is accepted as yet.
        ep: ranks that hold different experts (expert parallelism). They are ranks of tp and dp, not further ones.
        etp: ranks that split each expert, 1 or tp; tp by default.
        virtual_stages: stages of the pipeline that each of its ranks holds: its c-th is stage c·pp + its place.
        microbatches: into so many of equal numbers of rows `train_step` cuts a batch; a list of batches it takes as it
            is. Their losses are averaged (see `loss_reduction`), and gradients summed over ranks once a step.
        schedule: in which order the ranks of a pipeline run the microbatches: a name of `fxpar schedule` (1f1b;
            interleaved_1f1b by default where ranks have several stages), or a file of the same text form.
        split: what to do with modules or parameters, by glob on their full name. `column` splits the output features
            of a matrix, `row` the input features, `head` is `column` where every shard must consist of whole
            attention heads, `vocab` cuts the words of an embedding table or of an output head, `replicate` keeps the
            parameter whole; what no line names is chosen by cost. A glob names a module (all its parameters) or a
            single parameter. A line that names the parameter itself wins over lines for its module; two lines of one
            kind must agree. The order of lines is irrelevant: they are stored sorted.
        batch_dims: by path of an input (`labels`, `batch.0`) which of its dimensions is the rows of the batch, where
            that is not the first, or not one dimension alone.
        pad_values: by path of an input what stands in it after the end of a sequence, for data ranks whose batches
            have other lengths: 0 by itself, in a mask what masks, in targets of a loss what it ignores.
        loss_reduction: what the loss of a step is where it is a mean. `mean` is that over the rows of all data ranks of
            a microbatch, averaged over microbatches; `token` that over all that counts in the step; `local_mean` the
            mean of the means of each data rank, as Megatron has it. `sum` adds the losses of all microbatches and data
            ranks: for a loss that the author divided by what counts in the whole step (`num_items_in_batch` of
            transformers, which no other reduction accepts).
        batch_norm: what a norm by statistics of the batch does in training where data ranks share out the batch:
            `refuse`, for its statistics would be of a rank's rows, or `global`, statistics of all ranks' rows of a
            microbatch, which one device has.
        sequence_parallel: whether activations between the split matrices may be cut over the sequence, so that norms,
            dropout and residuals are shared out too: all-reduces become pairs of reduce-scatter and all-gather. tp must
            divide the sequence length.
        shard: what data ranks share out of each parameter that they divide, with the optimizer's state and, for more
            than one of them, less at a time (sharded data parallelism, ZeRO). `none`: nothing. `optimizer`: between
            steps a rank has its part of a parameter; the whole is gathered once a step, and whole gradients are added
            up until the last backward, after which each rank has its part of the sum. `gradients`: gradients are summed
            and shared out in each microbatch. `parameters`: a parameter is gathered where a layer reads it, in the
            backward again, and no rank holds the whole model. `parameters()` gives the parts in each case.
        dp_shard: neighbouring data ranks that share out parameters, where others hold the same (hybrid sharding, HSDP):
            a divisor of dp; by default all of them.
        seed: of dropout and other random nodes, and of the initial weights of a model on the meta device.
        precision: element types. `as_is` takes the model's own; `fp32` and `bf16_weights` cast the model, and with it
            gradients and optimizer state. `bf16` and `fp16` are mixed precision (FSDP2's `MixedPrecisionPolicy` with
            this `param_dtype` and `reduce_dtype=torch.float32`): the program runs in that type on copies of float32
            parameters, cast once a step; gradients are accumulated, and summed over ranks, in float32. `fp16` needs
            loss scaling: `train_step(batch, scaler=torch.amp.GradScaler())`. Buffers keep their types.
        cast_inputs: whether floating tensors that the forward takes, in any nest, are cast to the precision's type, as
            FSDP2 does by `cast_forward_inputs`; of `as_is` none is. A loss callable gets the batch as it is.
        compile: whether a rank's program runs through `torch.compile`: one forward and one backward graph, compiled on
            the first call with new shapes (minutes for a large model). Otherwise it runs operator by operator.
        size_programs: how many programs a mode and a structure of batches may have, each for sizes of its own: where
            PyTorch differentiates a model for one length at a time, each length needs one. One more is an error.
        experts: how tokens reach their experts: see `fxpar.Experts`. A file has a mapping of what differs, as of all
            records.
        pipeline: where the stages of a pipeline begin: see `fxpar.Pipeline`.
        recompute: what the backward computes again: see `fxpar.Recompute`.
        communication: how ranks send: see `fxpar.Communication`.
        operators: what the author says of operators that no rule knows: see `fxpar.Operators`.
        cuda_graphs: what of a step is replayed as CUDA graphs, eager or compiled: see `fxpar.CudaGraphs`. On CPUs a
            stand-in replays the same calls, for tests.
        cost: constants by which layouts are chosen: see `fxpar.Cost`.
    """

    tp: int = 1
    dp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    virtual_stages: int = 1
    microbatches: int = 1
    schedule: str = ""
    split: Mapping[str, str] = field(default_factory=dict)
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    pad_values: Mapping[str, int | float | bool] = field(default_factory=dict)
    loss_reduction: str = "mean"
    batch_norm: str = "refuse"
    sequence_parallel: bool = False
    shard: str = "none"
    dp_shard: int | None = None
    seed: int = 0
    precision: str = "as_is"
    cast_inputs: bool = True
    compile: bool = False
    size_programs: int = 16
    experts: Experts = field(default_factory=Experts)
    pipeline: Pipeline = field(default_factory=Pipeline)
    recompute: Recompute = field(default_factory=Recompute)
    communication: Communication = field(default_factory=Communication)
    operators: Operators = field(default_factory=Operators)
    cuda_graphs: CudaGraphs = field(default_factory=CudaGraphs)
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PlanError("; ".join(problems), where="plan", remedy="help(fxpar.Plan) lists the options")
        for name in _MAPPINGS:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        for name in GROUPS:  # anew: lists that it was made of may have changed
            object.__setattr__(self, name, dataclasses.replace(getattr(self, name)))

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns a read-only mapping cannot be pickled or copied; a plan's YAML is all of it."""
        return Plan.from_yaml, (self.to_yaml(),)

    def _problems(self) -> Iterator[str]:
        yield from self._wrong_sizes()
        yield from self._wrong_parts()
        yield from self._wrong_options()

    def _wrong_sizes(self) -> Iterator[str]:
        for axis in _AXES:
            if axis != "etp" or self.etp is not None:
                yield from wrong_count(axis, getattr(self, axis))
        if type(self.cp) is int and self.cp > 1:  # no pass of it exists yet
            yield f"cp={shown(self.cp)} is not supported yet: leave cp=1"

        wrong = [] if self.dp_shard is None else list(wrong_count("dp_shard", self.dp_shard))
        yield from wrong
        if self.dp_shard == 1 and not wrong:
            yield "dp_shard=1 shares out nothing: give at least 2, or leave it and shard out"
        if self.shard == "none" and self.dp_shard is not None and not wrong:
            yield f"dp_shard={shown(self.dp_shard)} is of a shard, and shard='none': give another, or leave it out"
        if self.shard != "none" and type(self.dp) is int and self.dp == 1:
            yield f"shard={shown(self.shard)} is of data ranks, and dp=1: give dp of at least 2, or leave it out"

    def _wrong_parts(self) -> Iterator[str]:
        """Yields what the dense and the expert part contradict each other in, once each size is one."""
        sizes = [getattr(self, axis) for axis in _AXES if axis != "etp" or self.etp is not None]
        sizes += [] if self.dp_shard is None else [self.dp_shard]
        if all(type(size) is int and 0 < size <= MOST_RANKS for size in sizes):
            if self.etp not in ((None, self.tp) if self.ep == 1 else (None, 1, self.tp)):
                yield f"etp={self.etp} is not tp={self.tp}: give {'' if self.ep == 1 else '1 or '}{self.tp}"
                return
            try:
                self.mesh.holders  # noqa: B018 - for what it raises
            except PlanError as error:
                yield f"{error.reason}: {error.remedy}"

    def _wrong_options(self) -> Iterator[str]:
        if not isinstance(self.split, Mapping):
            yield f"split must be a mapping from name globs to {', '.join(SPLITS)}, got {shown(self.split)}"
        else:
            for glob, how in self.split.items():
                if not isinstance(glob, str) or not glob:
                    yield f"split has the key {shown(glob)}: write a glob on module or parameter names"
                yield from wrong_word(f"split[{shown(glob)}]", how, SPLITS)
        yield from by_path("batch_dims", self.batch_dims, (int,), "dimension")
        yield from by_path("pad_values", self.pad_values, (int, float, bool), "number")
        for name in ("sequence_parallel", "compile", "cast_inputs"):
            yield from wrong_switch(name, getattr(self, name))
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            yield f"seed must be an integer in [0, 2^63), got {shown(self.seed)}"
        for name in ("size_programs", "microbatches", "virtual_stages"):
            yield from wrong_count(name, getattr(self, name))
        if type(self.schedule) is not str:
            yield f"schedule must be a name or a file, got {shown(self.schedule)}"
        for name, words in CHOICES.items():
            yield from wrong_word(name, getattr(self, name), words)
        yield from self._wrong_groups()

    def _wrong_groups(self) -> Iterator[str]:
        """Yields what is wrong with records, and with records together with other options once these are records."""
        wrong: list[str] = []
        for name, kind in GROUPS.items():
            record = getattr(self, name)
            if isinstance(record, kind):
                wrong += record.problems()
            else:
                wrong.append(
                    f"{name} must be a fxpar.{kind.__name__}, got {shown(record)}: write {_example(kind, record)}"
                )
        yield from wrong
        if not wrong:
            yield from self._wrong_pipeline()
            yield from self._wrong_experts()
            if self.shard != "none" and self.cuda_graphs.impl == "transformer_engine":
                yield (
                    f"shard={shown(self.shard)} gathers parameters, which CudaGraphs('transformer_engine') takes whole "
                    "from the module: give CudaGraphs('full_iteration') or CudaGraphs('partial')"
                )

    def _wrong_pipeline(self) -> Iterator[str]:
        """Yields what the stages of a pipeline and its schedule contradict, once each of their numbers is one."""
        virtual, stages = self.virtual_stages, self.pipeline.stages
        if any(type(number) is not int or not 1 <= number <= MOST_RANKS for number in (self.pp, virtual)):
            return
        count = self.pp * virtual
        if self.pp == 1 and virtual > 1:
            yield f"virtual_stages={virtual} without a pipeline, pp={self.pp}: give pp of at least 2, or leave them out"
        if isinstance(stages, Mapping):
            for name, number in stages.items():
                if number >= count:
                    yield (
                        f"pipeline.stages[{name!r}]={shown(number)} is none of the stages 1 to {count - 1}: give one "
                        "of these"
                    )
        elif stages and len(stages) != count:
            yield (
                f"pipeline.stages={shown(stages)} has {len(stages)} numbers of layers for {count} stages: give one for "
                "each"
            )
        if self.schedule and self.pp == 1:
            yield f"schedule={shown(self.schedule)} is of a pipeline, and pp=1: give pp of at least 2, or leave it out"
        size = self.pipeline.group_size
        if size is not None and virtual == 1:
            yield f"pipeline.group_size={shown(size)} is of several stages a rank: give virtual_stages, or leave it out"
        if self.schedule in _SPLIT_BACKWARDS and self.cuda_graphs.impl == "transformer_engine":
            yield (
                f"schedule={shown(self.schedule)} splits backwards, which cuda_graphs.impl='transformer_engine' cannot "
                "capture: give another schedule, or CudaGraphs('partial') or CudaGraphs('full_iteration')"
            )

    def _wrong_experts(self) -> Iterator[str]:
        """Yields what is wrong with a dispatch together with other options."""
        dispatch, factor, graphs = self.experts.dispatch, self.experts.recv_capacity_factor, self.cuda_graphs
        if factor is not None:
            if self.ep == 1 or dispatch == "dropless":
                yield (
                    f"experts.recv_capacity_factor={shown(factor)} is of dispatch='static' with ep of at least 2: "
                    "choose these, or leave it out"
                )
            if graphs.impl == "transformer_engine":
                yield (
                    "experts.recv_capacity_factor repeats steps, which CudaGraphs('transformer_engine') cannot: leave "
                    "it out, or give CudaGraphs('full_iteration') or CudaGraphs('partial')"
                )
        if self.experts.spare_experts and self.ep == 1:
            yield (
                f"experts.spare_experts={shown(self.experts.spare_experts)} is of experts on several ranks, and ep=1: "
                "give ep of at least 2, or leave it out"
            )
        if dispatch != "static" and self.ep == 1:
            yield f"experts.dispatch={shown(dispatch)} is of experts on several ranks, and ep=1: give ep of at least 2"
        if dispatch == "dropless" and graphs.impl not in ("none", "partial"):
            yield (
                "experts.dispatch='dropless' reads on the host how many rows travel, which "
                f"CudaGraphs({graphs.impl!r}) cannot: give CudaGraphs('partial'), or dispatch='static'"
            )
        if dispatch == "dropless" and "moe" in graphs.scope:
            yield (
                "cuda_graphs.scope has moe, a whole layer of experts, of which experts.dispatch='dropless' reads sizes "
                "on the host: give moe_router and moe_preprocess, or dispatch='static'"
            )

    @property
    def axes(self) -> dict[str, int]:
        """Returns sizes of the axes that layouts name, those larger than one, in nesting order, the outermost first."""
        return self.mesh.nested(DENSE)

    def axes_for(self, cuts: Cuts) -> dict[str, int]:
        """Returns sizes of those axes whose ranks share out the batch, the features …"""
        return {axis: size for axis, size in self.axes.items() if PURPOSES[axis].cuts is cuts}

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Returns the axes whose ranks share out parameters."""
        axes = () if self.shard == "none" else tuple(self.axes_for(Cuts.BATCH))
        # The ranks of the outer factor of dp have the same shards.
        return axes if self.dp_shard in (None, self.dp) else tuple(axis for axis in axes if axis != "dp_out")

    @property
    def data_ranks(self) -> int:
        """Returns parts into which the batch is shared out."""
        return math.prod(self.axes_for(Cuts.BATCH).values())

    @property
    def splitting(self) -> int:
        """Returns ranks that split each layer."""
        return math.prod(self.axes_for(Cuts.FEATURES).values())

    def on_one_rank(self) -> Plan:
        """Returns the plan for a single device: no axis has several ranks, nothing is split, and all is kept."""
        changes: dict[str, Any] = {**dict.fromkeys(_AXES, 1), "etp": None, "split": {}, "virtual_stages": 1}
        changes |= {"shard": "none", "dp_shard": None}
        changes |= {"microbatches": 1, "schedule": "", "pipeline": Pipeline(), "recompute": Recompute()}
        changes |= {"experts": Experts(expert_modules=self.experts.expert_modules), "cuda_graphs": CudaGraphs()}
        changes["operators"] = dataclasses.replace(self.operators, batchwise_ops=())
        return dataclasses.replace(self, **changes)

    def with_slots_of(self, decided: Plan) -> Plan:
        """Returns the plan with the spare slots of a compiled program's, which may have been left to loads."""
        return dataclasses.replace(self, experts=decided.experts)

    @property
    def world_size(self) -> int:
        """Returns ranks the plan needs."""
        return len(self.mesh.ranks)

    @cached_property
    def mesh(self) -> Mesh:
        """Returns which ranks communicate with which."""
        return Mesh(
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            dp=self.dp,
            virtual=self.virtual_stages,
            dp_shard=self.dp_shard,
        )

    @property
    def pipeline_stages(self) -> int:
        """Returns stages of the pipeline on all its ranks."""
        return self.pp * self.virtual_stages

    def replace(self, **changes: Any) -> Plan:
        """Returns a checked copy with other options.

        Raises:
            PlanError: an unknown option, or a value the plan refuses.
        """
        _check_names(changes, "plan", "write {record}=dataclasses.replace(plan.{record}, {option}=…)")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns what differs from the defaults, in plain values."""
        return plain_changes(self, Plan())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Returns the plan of what `to_dict` returned.

        Raises:
            PlanError: an unknown option, or a value the plan refuses.
        """
        if not isinstance(values, Mapping):
            raise PlanError(f"must be a mapping, got {shown(values)}", where=where, remedy="write {'tp': 2}")
        _check_names(values, where, "write '{record}: {{{option}: …}}'")
        groups = {name: group(name, values[name], kind, where) for name, kind in GROUPS.items() if name in values}
        return cls(**{**values, **groups})

    def to_yaml(self) -> str:
        """Returns what differs from the defaults alone, so that files stay short."""
        values = self.to_dict()
        return str(yaml.safe_dump(values, sort_keys=False)) if values else "{}\n"

    @classmethod
    def from_yaml(cls, text: str, *, where: str = "plan") -> Plan:
        """Returns the plan of what `to_yaml` returned.

        Raises:
            PlanError: no mapping, an unknown option, or a value the plan refuses.
        """
        values = read_mapping(text, where)
        return cls.from_dict(values, where=where)

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML.

        Raises:
            PlanError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.to_yaml(), encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(fault(error), where=shorter(str(path)), remedy="name a file that can be written") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a YAML file.

        Raises:
            PlanError: the file cannot be read or is no plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise PlanError(
                "the file must be text in UTF-8", where=str(path), remedy="name a readable YAML file"
            ) from None
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(fault(error), where=shorter(str(path)), remedy="name a readable YAML file") from None
        return cls.from_yaml(text, where=str(path))


def _example(kind: type[OptionGroup], value: Any) -> str:
    """Returns how a record is written: with the value that stands in its place where its first option takes that."""
    first = dataclasses.fields(kind)[0].name
    if isinstance(value, str) and not any(kind(**{first: value}).problems()):
        return f"{kind.__name__}({first}={value!r})"
    options = ", ".join(entry.name for entry in dataclasses.fields(kind))
    return f"{kind.__name__}(OPTION=VALUE) of its options {options}"


def _check_names(values: Mapping[str, Any], where: str, remedy: str) -> None:
    """Refuses what is no option of a plan, and says where it stands if it is one of a record.

    Args:
        remedy: how an option of a record is written, with places for both names.

    Raises:
        PlanError: names it.
    """
    for name, kind in GROUPS.items():
        for option in [entry.name for entry in dataclasses.fields(kind) if entry.name in values]:
            if option not in Plan.__dataclass_fields__:
                reason = f"{option} is an option of {name}"
                raise PlanError(reason, where=where, remedy=remedy.format(record=name, option=option))
    check_known(values, Plan, where)
