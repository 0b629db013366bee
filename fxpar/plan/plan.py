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
from types import MappingProxyType
from typing import Any

import yaml

from fxpar.errors import PlanError, shorter, shown
from fxpar.mesh.axes import DENSE, PURPOSES, Cuts
from fxpar.mesh.mesh import Mesh
from fxpar.plan.cost import Cost
from fxpar.plan.option_groups import (
    DISPATCHES,
    DROP_POLICIES,
    MOST_RANKS,
    RECOMPUTES,
    CudaGraphs,
    by_path,
    changed,
    check_known,
    expert_problems,
    fault,
    globs,
    part,
    pipeline_problems,
    read_mapping,
    recompute_problems,
)

SPLITS = ("column", "row", "head", "vocab", "replicate")
LOSS_REDUCTIONS = ("mean", "token", "local_mean", "sum")
BATCH_NORMS = ("refuse", "global")
PRECISIONS = ("as_is", "fp32", "bf16", "fp16", "bf16_weights")
EXCHANGES = ("auto", "nccl", "copy")
# Options that take one of some words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    **{"loss_reduction": LOSS_REDUCTIONS, "batch_norm": BATCH_NORMS, "precision": PRECISIONS, "recompute": RECOMPUTES},
    **{"exchange": EXCHANGES, "dispatch": DISPATCHES, "drop_policy": DROP_POLICIES},
}

# Options that are mappings, which are kept sorted and cannot be written to.
_MAPPINGS = ("split", "batch_dims", "padding")
# Options that are globs, which are kept sorted.
_GLOBS = ("row_wise", "added_losses", "experts")
# Options that have options of their own, and an example of each.
_PARTS: Mapping[str, tuple[type, str]] = {
    "cuda_graphs": (CudaGraphs, "{impl: partial}"),
    "cost": (Cost, "{bandwidth: …}"),
}
_AXES = ("tp", "dp", "cp", "pp", "ep", "etp")

_USED_AXES = (
    *(("tp", "that split each layer"), ("dp", "that share out the batch"), ("pp", "that share out the layers")),
    *(("ep", "that hold different experts"), ("etp", "that split each expert")),
)
# Axes of DESIGN's mesh whose passes do not exist yet; asking for them is refused by name.
_LATER_AXES = (("cp", ""),)


@dataclass(frozen=True)
class Plan:
    """How to parallelise a model.

    Attributes:
        tp: ranks that split each layer (tensor parallelism).
        dp: groups of ranks that share out the batch (data parallelism).
        pp: ranks that share out the layers, each a stage of a pipeline (pipeline parallelism).
        cp: context parallel ranks; only 1 is accepted as yet.
        ep: ranks that hold different experts (expert parallelism). They are ranks of tp and dp, not further ones.
        etp: ranks that split each expert, 1 or tp; tp by default.
        virtual_stages: stages of the pipeline that each of its ranks holds: its c-th is stage c·pp + its place.
        stages: where stages begin: for some or all but the first the name of a module, as the model names it, and the
            number of the stage that begins with it; or for all stages how many layers they have, in order. What is not
            said is chosen by cost.
        microbatches: into so many of equal numbers of rows `train_step` cuts a batch; a list of batches it takes as it
            is. Their losses are averaged (see `loss_reduction`), and gradients summed over ranks once a step.
        schedule: in which order the ranks of a pipeline run the microbatches: a name of `fxpar schedule` (1f1b;
            interleaved_1f1b by default where ranks have several stages), or a file of the same text form.
        group_size: of an interleaved schedule, how many microbatches of one stage a rank runs before it takes the next
            of its stages; pp by default.
        split: what to do with modules or parameters, by glob on their full name. `column` splits the output features
            of a matrix, `row` the input features, `head` is `column` where every shard must consist of whole
            attention heads, `vocab` cuts the words of an embedding table or of an output head, `replicate` keeps the
            parameter whole; what no line names is chosen by cost. A glob names a module (all its parameters) or a
            single parameter. A line that names the parameter itself wins over lines for its module; two lines of one
            kind must agree. The order of lines is irrelevant: they are stored sorted.
        batch_dims: by path of an input (`labels`, `batch.0`) which of its dimensions is the rows of the batch, where
            that is not the first, or not one dimension alone.
        padding: by path of an input what stands in it behind the end of a sequence, for data ranks whose batches have
            other lengths: 0 by itself, in a mask what masks, in targets of a loss what it ignores.
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
        seed: of dropout and other random nodes, and of the initial weights of a model on the meta device.
        row_wise: globs on the names of operators that no rule knows (`mylib.scan.default`, as the text form has it, or
            an autograd function's class, `mymodel.scan.Scan`), each of which computes the rows of the batch apart:
            dimension 0 of an operand or output whose size is a multiple of the batch is rows, other operands serve all
            rows. Data parallel ranks can run an operator without a rule only so. That it is true is checked when the
            model is captured. A glob that matches none is an error. The order is irrelevant: they are stored sorted.
        added_losses: globs on the names of autograd functions (`mymodel.moe.AddLoss`) that return their first operand,
            and whose backward gives their other one, a scalar loss, a fixed gradient: router losses are added so. That
            one is then a term of the model's loss, without its value, and weighed as that is: over microbatches, words
            and data ranks. What the function multiplies by is for a step of one microbatch, and read when the model is
            captured, with a trial that the function does this and nothing else.
        precision: element types. `as_is` takes the model's own; `fp32` and `bf16_weights` cast the model, and with it
            gradients and optimizer state. `bf16` and `fp16` are mixed precision (FSDP2's `MixedPrecisionPolicy` with
            this `param_dtype` and `reduce_dtype=torch.float32`): the program runs in that type on copies of float32
            parameters, cast once a step; gradients are accumulated, and summed over ranks, in float32. `fp16` needs
            loss scaling: `train_step(batch, scaler=torch.amp.GradScaler())`. Buffers keep their types.
        cast_inputs: whether floating tensors that the forward takes, in any nest, are cast to the precision's type, as
            FSDP2 does by `cast_forward_inputs`; of `as_is` none is. A loss callable gets the batch as it is.
        recompute: what the backward computes again besides regions that the author checkpointed. `none`: nothing.
            `selective`: all that saves memory and has neither a matrix product nor a collective in it; with an
            `activation_budget`, what costs least time to keep within that. `full`: each layer from what enters it.
        activation_budget: with `selective`, the most that a rank keeps for the backward, for inputs of the example's
            sizes: up to 1 a part of what `none` keeps, above it bytes. Gathers of a sequence are sent again where that
            is cheapest, products computed again where it cannot be kept without; one that cannot be kept is refused.
        compile: whether a rank's program runs through `torch.compile`: one forward and one backward graph, compiled on
            the first call with new shapes (minutes for a large model). Otherwise it runs operator by operator.
        exchange: how the ranks of an axis send what is large in each microbatch of a training step. `nccl`: through
            their process group, whichever backend that has. `copy`: into each other's memory, on GPUs by copy engines,
            which leave the multiprocessors to products, or a kernel where there are none beside it; ranks that cannot
            are refused. `auto`: so between two GPUs that reach each other's memory; between more NCCL is faster. What
            is smaller than `cost.least_copy`, but for such kernels, and what is sent once a step the group sends.
        size_programs: how many programs a mode and a structure of batches may have, each for sizes of its own: where
            PyTorch differentiates a model for one length at a time, each length needs one. One more is an error.
        dispatch: how tokens come to the ranks that hold their experts. `static`: so that no size depends on the routing
            and nothing waits for the host, in whichever of two ways less travels. `allgather`: each of those ranks gets
            the tokens of all, or where they copy (`exchange`) those that it needs if that is less than nine tenths, and
            sums of what its experts make of them go back; not where tensor parallel ranks share tokens that data ranks
            send. `alltoall`: rows travel, in buffers of as many places as tokens may ever need. `exact`: rows alone;
            how many is on the host in front of the all-to-all: nothing is compiled, nor captured as CUDA graphs.
        receive_budget: of dispatch other than `exact`, how many places its buffers have, as a multiple, of at least 1,
            of what they need where the load is even, and no more than tokens may ever need. A training step in which
            more rows come is noticed behind its backward, before its gradients count, and repeated with buffers of as
            many places as may be needed; calls outside of `train_step` have these always. None: all do.
        capacity_factor: a limit of the rows that an expert takes, as a multiple of what each gets of a rank's T tokens
            where the load is even: ceil(T·K / E · capacity_factor) of each source for K of E experts a token. Sources
            are data ranks, and where `ep` has several ranks each tensor parallel rank with its part of the sequence, in
            which padding counts. What goes beyond is dropped: those experts add nothing to the token's sum, and the
            other weights stay what they are. A training is then not that of one device, but that of one device that
            drops the same rows. None: nothing is dropped.
        drop_policy: with a `capacity_factor`, which rows an expert takes: `probs`, those of the largest weights, of
            equal ones those that stand first; `position`, those that stand first.
        pad_to_capacity: with a `capacity_factor` and `static` dispatch, whether each expert computes as many rows as
            its capacity, rows of zeros where it has fewer: products whose sizes no routing changes.
        experts: globs on the names of modules of experts (`*.mlp.experts`) whose forward is
            `(hidden_states [T, h], top_k_index [T, K], top_k_weights [T, K]) -> [T, h]`, with a loop over experts that
            depends on the routing, and so cannot be traced. They are computed as experts on rows instead, from weights
            of the usual names: `gate_up_proj` and `down_proj`, `gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3`
            and `w2`, without a gate `up_proj` or `w1` alone; stacked, [E, out, in] or [E, in, out], with biases
            `…_bias`, or linear layers of a list of experts, whose weights each rank of `ep` has whole. `act_fn` is the
            activation, SiLU by default, `_apply_gate` a gate of its own. When the model is captured each is run on
            random values, and refused where its own forward gives anything else. Models of transformers whose experts
            its `ExpertsInterface` dispatches need no line. A glob that matches none is an error.
        cuda_graphs: what of a step is replayed as CUDA graphs, eager or compiled: see `fxpar.CudaGraphs`. In YAML a
            mapping of what differs. On CPUs a stand-in replays the same calls, for tests.
        cost: constants by which layouts are chosen; in YAML a mapping of those that differ.
    """

    tp: int = 1
    dp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    virtual_stages: int = 1
    stages: Mapping[str, int] | tuple[int, ...] = ()
    microbatches: int = 1
    schedule: str = ""
    group_size: int | None = None
    split: Mapping[str, str] = field(default_factory=dict)
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    padding: Mapping[str, int | float | bool] = field(default_factory=dict)
    loss_reduction: str = "mean"
    batch_norm: str = "refuse"
    row_wise: tuple[str, ...] = ()
    added_losses: tuple[str, ...] = ()
    sequence_parallel: bool = False
    seed: int = 0
    precision: str = "as_is"
    cast_inputs: bool = True
    recompute: str = "none"
    activation_budget: int | float | None = None
    compile: bool = False
    exchange: str = "auto"
    size_programs: int = 16
    dispatch: str = "static"
    receive_budget: int | float | None = None
    capacity_factor: int | float | None = None
    drop_policy: str = "probs"
    pad_to_capacity: bool = False
    experts: tuple[str, ...] = ()
    cuda_graphs: CudaGraphs = field(default_factory=CudaGraphs)
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PlanError("; ".join(problems), where="plan", remedy="help(fxpar.Plan) lists the options")
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(sorted(getattr(self, name).items()))))
        for name in _GLOBS:
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        is_mapping = isinstance(self.stages, Mapping)
        stages = MappingProxyType(dict(sorted(self.stages.items()))) if is_mapping else tuple(self.stages)  # type: ignore[union-attr]
        object.__setattr__(self, "stages", stages or ())

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    def __reduce__(self) -> tuple[Any, ...]:
        """A read-only mapping cannot be pickled or copied; a plan's YAML is all of it."""
        return Plan.from_yaml, (self.to_yaml(),)

    def _problems(self) -> Iterator[str]:
        yield from self._wrong_sizes()
        yield from self._wrong_parts()
        yield from self._wrong_options()

    def _wrong_sizes(self) -> Iterator[str]:
        for axis, use in (*_USED_AXES, *_LATER_AXES):
            size = getattr(self, axis)
            if axis == "etp" and size is None:
                continue
            if type(size) is not int or size < 1:
                yield f"{axis}={shown(size)} is no positive integer: give the number of ranks"
            elif not use and size > 1:
                yield f"{axis}={shown(size)} is not supported yet: leave {axis}=1"
            elif size > MOST_RANKS:
                yield f"{axis}={shown(size)} is more than {MOST_RANKS}: give the number of ranks {use}"

    def _wrong_parts(self) -> Iterator[str]:
        """What the dense and the expert part contradict each other in, once each size is one."""
        sizes = [getattr(self, axis) for axis in _AXES if axis != "etp" or self.etp is not None]
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
            yield f"split={shown(self.split)} is no mapping from name globs to {', '.join(SPLITS)}"
        else:
            for glob, how in self.split.items():
                if not isinstance(glob, str) or not glob:
                    yield f"split has the key {shown(glob)}: write a glob on module or parameter names"
                if how not in SPLITS:
                    yield f"split[{shown(glob)}]={shown(how)} is unknown: choose one of {', '.join(SPLITS)}"
        yield from pipeline_problems(self)
        yield from expert_problems(self)
        yield from by_path("batch_dims", self.batch_dims, (int,), "dimension")
        yield from by_path("padding", self.padding, (int, float, bool), "number")
        yield from globs("row_wise", self.row_wise, "operators")
        yield from globs("added_losses", self.added_losses, "autograd functions")
        yield from globs("experts", self.experts, "modules")
        for name in ("sequence_parallel", "compile", "cast_inputs"):
            if type(getattr(self, name)) is not bool:
                yield f"{name}={shown(getattr(self, name))} is neither True nor False: write one of them"
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            yield f"seed={shown(self.seed)} is no integer in [0, 2^63): choose another seed"
        if type(self.size_programs) is not int or not 1 <= self.size_programs <= MOST_RANKS:
            yield f"size_programs={shown(self.size_programs)} is no number of programs: give one of at least 1"
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                yield f"{name}={shown(getattr(self, name))} is unknown: choose one of {', '.join(words)}"
        yield from recompute_problems(self)
        if isinstance(self.cuda_graphs, CudaGraphs):
            yield from self.cuda_graphs.problems()
        else:
            yield f"cuda_graphs={shown(self.cuda_graphs)} is no fxpar.CudaGraphs: write CudaGraphs('partial')"
        if isinstance(self.cost, Cost):
            yield from self.cost.problems()
        else:
            yield f"cost={shown(self.cost)} is no fxpar.Cost: write Cost(bandwidth=…)"

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes that layouts name, those larger than one, in nesting order, the outermost first."""
        return self.mesh.nested(DENSE)

    def axes_for(self, cuts: Cuts) -> dict[str, int]:
        """Sizes of those axes whose ranks share out the batch, the features …"""
        return {axis: size for axis, size in self.axes.items() if PURPOSES[axis].cuts is cuts}

    @property
    def data_ranks(self) -> int:
        """Parts into which the batch is shared out."""
        return math.prod(self.axes_for(Cuts.BATCH).values())

    @property
    def splitting(self) -> int:
        """Ranks that split each layer."""
        return math.prod(self.axes_for(Cuts.FEATURES).values())

    def on_one_rank(self) -> Plan:
        """The same plan for a single device: no axis has several ranks, no line splits anything, and all is kept."""
        changes: dict[str, Any] = {**dict.fromkeys(_AXES, 1), "etp": None, "split": {}, "row_wise": ()}
        changes |= {"virtual_stages": 1, "stages": (), "microbatches": 1, "schedule": "", "group_size": None}
        changes |= {"dispatch": "static", "receive_budget": None, "capacity_factor": None}
        changes |= {"drop_policy": "probs", "pad_to_capacity": False}
        changes |= {"recompute": "none", "activation_budget": None, "cuda_graphs": CudaGraphs()}
        return dataclasses.replace(self, **changes)

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return len(self.mesh.ranks)

    @cached_property
    def mesh(self) -> Mesh:
        """Which ranks communicate with which."""
        return Mesh(
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            dp=self.dp,
            virtual=self.virtual_stages,
        )

    @property
    def pipeline_stages(self) -> int:
        """Stages of the pipeline on all its ranks."""
        return self.pp * self.virtual_stages

    def replace(self, **changes: Any) -> Plan:
        """A checked copy with other options.

        Raises:
            PlanError: an unknown option, or a value the plan refuses.
        """
        check_known(changes, Plan, "plan")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, in plain values."""
        values = changed(self, Plan())
        values |= {name: dict(values[name]) for name in _MAPPINGS if name in values}
        values |= {name: list(values[name]) for name in _GLOBS if name in values}
        if "stages" in values:
            values["stages"] = dict(self.stages) if isinstance(self.stages, Mapping) else list(self.stages)
        for name in _PARTS:
            if name in values:
                values[name] = getattr(self, name).to_dict()
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "plan") -> Plan:
        """Inverse of `to_dict`.

        Raises:
            PlanError: an unknown option, or a value the plan refuses.
        """
        if not isinstance(values, Mapping):
            raise PlanError(f"{shown(values)} is no mapping", where=where, remedy="write {'tp': 2}")
        check_known(values, cls, where)
        parts = {name: part(name, values[name], *_PARTS[name], where) for name in _PARTS if name in values}
        return cls(**{**values, **parts})

    def to_yaml(self) -> str:
        """Only what differs from the defaults, so that files stay short."""
        values = self.to_dict()
        return str(yaml.safe_dump(values, sort_keys=False)) if values else "{}\n"

    @classmethod
    def from_yaml(cls, text: str, *, where: str = "plan") -> Plan:
        """Inverse of `to_yaml`.

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
            raise PlanError("the file is no UTF-8 text", where=str(path), remedy="name a readable YAML file") from None
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(fault(error), where=shorter(str(path)), remedy="name a readable YAML file") from None
        return cls.from_yaml(text, where=str(path))
