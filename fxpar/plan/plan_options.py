"""Options of a plan that belong together, as records; and how options are read, compared and checked.

Enters: the values of a record. Leaves: the frozen record, what differs from its defaults, or what is wrong with it.
Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import yaml

from fxpar.errors import PlanError, shown

# More ranks than one axis ever had, more stages and microbatches: beyond them there is only a slip of the keyboard.
MOST_RANKS = 4096
_MOST_VARIANTS = 10000
IMPLEMENTATIONS = ("none", "partial", "transformer_engine", "full_iteration")
SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")
# Options of records that take one of some words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "mode": ("none", "selective", "full"),
    "collective_transport": ("auto", "nccl", "copy"),
    "dispatch": ("static", "allgather", "alltoall", "dropless"),
    "drop_policy": ("probs", "position"),
}


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together. Lists of names are kept sorted, and mappings cannot be written to."""

    def __post_init__(self) -> None:
        if any(self.problems()):  # the plan refuses it, and shows what was written
            return
        for entry in fields(self):
            object.__setattr__(self, entry.name, frozen(getattr(self, entry.name)))

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Gives the record as its options: a read-only mapping cannot be pickled or copied."""
        return _rebuilt, (type(self), self.to_dict())

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the values."""
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """Returns what differs from the defaults, in plain values."""
        return plain_changes(self, type(self)())


def _rebuilt(kind: type[OptionGroup], values: Mapping[str, Any]) -> OptionGroup:
    return kind(**values)


@dataclass(frozen=True)
class Pipeline(OptionGroup):
    """Where the stages of a pipeline begin, and how its ranks alternate between them.

    Example:
        ```python
        plan = fxpar.Plan(pp=2, microbatches=8, pipeline=fxpar.Pipeline(stages={"model.layers.10": 1}))
        ```

    Attributes:
        stages: where stages begin: for some or all but the first the name of a module, as the model names it, and the
            number of the stage that begins with it; or for all stages how many layers they have, in order. What is not
            said is chosen by cost.
        group_size: of an interleaved schedule, how many microbatches of one stage a rank runs before it takes the next
            of its stages; pp by default.
    """

    stages: Mapping[str, int] | tuple[int, ...] = ()
    group_size: int | None = None

    __hash__ = OptionGroup.__hash__

    def __post_init__(self) -> None:
        if not any(self.problems()):
            # Numbers of layers stand in the order of the stages.
            stages = frozen(self.stages) if isinstance(self.stages, Mapping) else tuple(self.stages)
            object.__setattr__(self, "stages", stages or ())

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        stages = self.stages
        if isinstance(stages, Mapping):
            for name, number in stages.items():
                if not isinstance(name, str) or not name:
                    yield f"pipeline.stages has the key {shown(name)}: write the name of a module"
                else:
                    yield from wrong_count(f"pipeline.stages[{name!r}]", number)
            if len({*map(repr, stages.values())}) != len(stages):
                yield "pipeline.stages gives two modules one stage: each begins once"
        elif not isinstance(stages, (tuple, list)) or any(type(count) is not int or count < 1 for count in stages):
            what = "a mapping from modules to stages, or numbers of layers"
            yield f"pipeline.stages must be {what}, got {shown(stages)}"
        if self.group_size is not None:
            yield from wrong_count("pipeline.group_size", self.group_size)


@dataclass(frozen=True)
class Recompute(OptionGroup):
    """What the backward computes again besides regions that the author checkpointed.

    Example:
        ```python
        plan = fxpar.Plan(recompute=fxpar.Recompute("selective", 0.4))
        ```

    Attributes:
        mode: what is computed again. `none`: nothing. `selective`: all that saves memory and has neither a matrix
            product nor a collective in it; with an `activation_memory_budget`, what costs least time to keep within
            that. `full`: each layer from what enters it.
        activation_memory_budget: with `selective`, the most that a rank keeps for the backward, for inputs of the
            example's sizes: up to 1 a part of what `none` keeps, above it bytes. Gathers of a sequence are sent again
            where that is cheapest, products computed again where it cannot be kept without; one that cannot be kept is
            refused.
    """

    mode: str = "none"
    activation_memory_budget: int | float | None = None

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        yield from wrong_words("recompute", self)
        budget, name = self.activation_memory_budget, "recompute.activation_memory_budget"
        if budget is None:
            return
        if type(budget) not in (int, float) or not 0 <= budget < 2**63 or (budget > 1 and budget != int(budget)):
            yield f"{name} must be a part from 0 to 1, or a number of bytes, got {shown(budget)}"
        elif self.mode != "selective":
            yield f"{name}={shown(budget)} is of mode='selective': choose that, or leave it out"


@dataclass(frozen=True)
class Communication(OptionGroup):
    """How ranks send.

    Example:
        ```python
        plan = fxpar.Plan(tp=2, communication=fxpar.Communication(collective_transport="nccl"))
        ```

    Attributes:
        collective_transport: how the ranks of an axis send what is large in each microbatch of a training step.
            `nccl`: through their process group, whichever backend that has. `copy`: into each other's memory, on GPUs
            by copy engines, which leave the multiprocessors to products, or a kernel where there are none alongside it;
            ranks that cannot are refused. `auto`: so between two GPUs that reach each other's memory; between more
            NCCL is faster. What is smaller than `cost.least_copy`, but for such kernels, and what is sent once a step
            the group sends. With `auto`, stages of a pipeline copy to each other where all its GPUs reach each other.
        token_chunks: into how many chunks of rows a step cuts what stands between two operations that mix tokens, so
            that products of one chunk run while sums of another travel. 1 computes all rows at once; `auto` takes the
            number that is cheapest by the plan's `cost`, in the forward, in the backward, or in both.
    """

    collective_transport: str = "auto"
    token_chunks: int | str = 1

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        yield from wrong_words("communication", self)
        if self.token_chunks != "auto":
            yield from wrong_count("communication.token_chunks", self.token_chunks, word="auto")


@dataclass(frozen=True)
class Operators(OptionGroup):
    """What an author says of operators that fxpar has no rule for.

    Example:
        ```python
        plan = fxpar.Plan(dp=4, operators=fxpar.Operators(batchwise_ops=("mylib.scan.default",)))
        ```

    Attributes:
        batchwise_ops: globs on the names of operators that no rule knows (`mylib.scan.default`, as the text form has
            it, or an autograd function's class, `mymodel.scan.Scan`), each of which computes the rows of the batch
            apart: dimension 0 of an operand or output whose size is a multiple of the batch is rows, other operands
            serve all rows. Data parallel ranks can run an operator without a rule only so. That it is true is checked
            when the model is captured. A glob that matches none is an error.
        added_losses: globs on the names of autograd functions (`mymodel.moe.AddLoss`) that return their first operand,
            and whose backward gives their other one, a scalar loss, a fixed gradient: router losses are added so. That
            one is then a term of the model's loss, without its value, and weighed as that is: over microbatches, words
            and data ranks. What the function multiplies by is for a step of one microbatch, and read when the model is
            captured, with a trial that the function does this and nothing else.
    """

    batchwise_ops: tuple[str, ...] = ()
    added_losses: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        yield from globs("operators.batchwise_ops", self.batchwise_ops, "operators")
        yield from globs("operators.added_losses", self.added_losses, "autograd functions")


@dataclass(frozen=True)
class Experts(OptionGroup):
    """How tokens reach their experts.

    Example:
        ```python
        plan = fxpar.Plan(dp=4, ep=4, experts=fxpar.Experts(dispatch="alltoall", capacity_factor=1.25))
        ```

    Attributes:
        dispatch: how tokens come to the ranks that hold their experts. `static`: so that no size depends on the routing
            and nothing waits for the host, in whichever of two ways less travels. `allgather`: each of those ranks gets
            the tokens of all, or where they copy (`collective_transport`) those that it needs if that is less than nine
            tenths, and sums of what its experts make of them go back; not where tensor parallel ranks share tokens that
            data ranks send. `alltoall`: rows travel, in buffers of as many places as tokens may ever need. `dropless`:
            rows alone; how many is on the host in front of the all-to-all: there CUDA graphs (`partial`) end, and
            what is compiled, up to where rows have come back.
        recv_capacity_factor: of dispatch other than `dropless`, how many places its buffers have, as a multiple, of at
            least 1, of what they need where the load is even, and no more than tokens may ever need. A training step in
            which more rows come is noticed after its backward, before its gradients count, and repeated with buffers
            of as many places as may be needed; calls outside of `train_step` have these always. None: all do.
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
        spare_experts: spare slots of each rank of `ep`, for replicas of experts that other ranks hold. Experts of the
            fullest ranks have replicas on ranks with fewer rows, in each microbatch others, so that no rank has more
            rows than with an even load, as far as slots suffice. Values stay what they are. Replicas are no parameters:
            their gradients are added to those of the experts. `auto`: the number, up to 4, that takes least time at the
            loads of `expert_loads`, by the plan's `cost`; a compiled program and a save have the number.
        min_gain: with `spare_experts`, the share of an even load by which a rank has to exceed it, so that its experts
            have replicas; 0 replicates whatever exceeds it. None: the share whose rows take as long to compute as the
            weights of one expert to travel, by the plan's `cost` and the example's sizes.
        expert_loads: with `spare_experts="auto"`, a file with `json.dumps(model.report().to_dict())` of a step.
        expert_modules: globs on the names of modules of experts (`*.mlp.experts`) whose forward is
            `(hidden_states [T, h], top_k_index [T, K], top_k_weights [T, K]) -> [T, h]`, with a loop over experts that
            depends on the routing, and so cannot be traced. They are computed as experts on rows instead, from weights
            of the usual names: `gate_up_proj` and `down_proj`, `gate_proj`, `up_proj` and `down_proj`, or `w1`, `w3`
            and `w2`, without a gate `up_proj` or `w1` alone; stacked, [E, out, in] or [E, in, out], with biases
            `…_bias`, or linear layers of a list of experts, whose weights each rank of `ep` has whole. `act_fn` is the
            activation, SiLU by default, `_apply_gate` a gate of its own. When the model is captured each is run on
            random values, and refused where its own forward gives anything else. Models of transformers whose experts
            its `ExpertsInterface` dispatches need no line. A glob that matches none is an error.
    """

    dispatch: str = "static"
    recv_capacity_factor: int | float | None = None
    capacity_factor: int | float | None = None
    drop_policy: str = "probs"
    pad_to_capacity: bool = False
    spare_experts: int | str = 0
    min_gain: int | float | None = None
    expert_loads: str = ""
    expert_modules: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        yield from wrong_words("experts", self)
        yield from globs("experts.expert_modules", self.expert_modules, "modules")
        factor = self.recv_capacity_factor
        if factor is not None and (type(factor) not in (int, float) or not 1 <= factor < 2**16):
            yield f"experts.recv_capacity_factor must be a number of at least 1, got {shown(factor)}"
        yield from wrong_switch("experts.pad_to_capacity", self.pad_to_capacity)
        slots = self.spare_experts
        if slots != "auto" and (type(slots) is not int or not 0 <= slots < 2**16):
            yield f"experts.spare_experts must be auto or a whole number of at least 0, got {shown(slots)}"
        if type(self.expert_loads) is not str:
            yield f"experts.expert_loads must be the name of a file, got {shown(self.expert_loads)}"
        elif bool(self.expert_loads) != (slots == "auto"):
            yield "experts.expert_loads and spare_experts='auto' need each other: give both, or none"
        if self.min_gain is not None and (type(self.min_gain) not in (int, float) or not 0 <= self.min_gain < 2**16):
            yield f"experts.min_gain must be a share of an even load, of at least 0, got {shown(self.min_gain)}"
        elif self.min_gain is not None and self.spare_experts == 0:
            yield "experts.min_gain is of spare_experts: give some, or leave min_gain out"
        if self.capacity_factor is None:
            depends = {"drop_policy": self.drop_policy != "probs", "pad_to_capacity": self.pad_to_capacity is True}
            for name in (name for name, is_set in depends.items() if is_set):
                yield f"experts.{name} is of a capacity_factor: give one, or leave {name} out"
        elif type(self.capacity_factor) not in (int, float) or not 0 < self.capacity_factor < 2**16:
            yield f"experts.capacity_factor must be a number above 0, got {shown(self.capacity_factor)}"
        else:
            yield from self._wrong_places()

    @property
    def slots(self) -> int:
        """Returns the spare slots of a rank, once these are a number."""
        assert isinstance(self.spare_experts, int)
        return self.spare_experts

    def _wrong_places(self) -> Iterator[str]:
        """Yields what contradicts a capacity."""
        if self.pad_to_capacity is True and self.dispatch == "dropless":
            yield (
                "experts.dispatch='dropless' sends rows alone, and pad_to_capacity others too: leave it out, or "
                "dispatch='static'"
            )
        if self.pad_to_capacity is True and self.dispatch == "allgather":
            yield (
                "experts.dispatch='allgather' sends tokens, and pad_to_capacity rows: leave it out, or give "
                "dispatch='static'"
            )
        places = self.recv_capacity_factor
        if places is None or type(places) not in (int, float):
            return
        if self.pad_to_capacity is True:
            yield (
                "experts.recv_capacity_factor and pad_to_capacity both say how many places a buffer has: leave one of "
                "them out"
            )
        elif self.capacity_factor is not None and places >= self.capacity_factor:
            yield (
                f"experts.recv_capacity_factor={places} is no less than capacity_factor={self.capacity_factor}, by "
                "which every row that is kept has a place: leave recv_capacity_factor out"
            )


@dataclass(frozen=True)
class CudaGraphs(OptionGroup):
    """CUDA graphs: kernels of a step are recorded once and launched together, so that the host is out of the way.

    Example:
        ```python
        plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
        ```

    Attributes:
        impl: `none`; `partial`, a graph for each region that can be captured, forward and backward (`fxpar regions`
            lists them); `transformer_engine`, the forward and the backward captured by its `make_graphed_callables`,
            where nothing in them ends a graph, of a pipeline those of each stage and microbatch;
            `full_iteration`, forward and backward of all microbatches of a `train_step`, and the reductions of
            gradients, in one graph.
        scope: of `partial`, the parts of layers that are captured: `attn` (norm, attention and the residual sum); `mlp`
            (norm, MLP without experts and its sum); of a layer of experts `moe` (all of it, which needs a dispatch
            whose sizes do not depend on the routing), or `moe_router` (norm, router and shared experts), and with it
            `moe_preprocess` (the sort by expert, up to where rows travel); all that can be, where none is named.
        variants: sets of shapes, addresses and modes for which there are graphs at most. A call that would need another
            one is refused.
    """

    impl: str = "none"
    scope: tuple[str, ...] = ()
    variants: int = 16

    @property
    def is_on(self) -> bool:
        """Returns whether anything is captured."""
        return self.impl != "none"

    @property
    def outside(self) -> str:
        """Returns why no graph is to hold what is outside of the scope; empty where none is named."""
        return f"is outside of the scope {', '.join(self.scope)}" if self.scope else ""

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        yield from wrong_word("cuda_graphs.impl", self.impl, IMPLEMENTATIONS)
        yield from wrong_count("cuda_graphs.variants", self.variants, _MOST_VARIANTS)
        if not isinstance(self.scope, (tuple, list)):
            yield f"cuda_graphs.scope must be a list of {', '.join(SCOPES)}, got {shown(self.scope)}"
            return
        for name in self.scope:
            if name not in SCOPES:
                yield f"cuda_graphs.scope has {shown(name)}: choose from {', '.join(SCOPES)}"
        if self.scope and self.impl != "partial":
            yield f"cuda_graphs.scope is of impl partial, and not of {shown(self.impl)}"
        if "moe_preprocess" in self.scope and "moe_router" not in self.scope:
            yield "cuda_graphs.scope has moe_preprocess, which needs moe_router: name both"
        if "moe" in self.scope and ("moe_router" in self.scope or "moe_preprocess" in self.scope):
            yield "cuda_graphs.scope has moe, which holds moe_router and moe_preprocess: name one or the others"


# What records and the plan share.


def frozen(option: Any) -> Any:
    """Returns an option as plans keep it: names sorted, each once, and mappings sorted and read-only."""
    if isinstance(option, Mapping):
        return MappingProxyType({key: frozen(option[key]) for key in sorted(option)})
    return tuple(sorted(set(option))) if isinstance(option, (list, tuple)) else option


def plain_changes(record: Any, default: Any) -> dict[str, Any]:
    """Returns the fields of a record that differ from the default's, as a file has them."""
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {name: _plain(value) for name, value in values.items() if value != getattr(default, name)}


def _plain(option: Any) -> Any:
    if isinstance(option, OptionGroup):
        return option.to_dict()
    if isinstance(option, Mapping):
        return {key: _plain(entry) for key, entry in option.items()}
    return list(option) if isinstance(option, tuple) else option


def wrong_words(record: str, values: OptionGroup) -> Iterator[str]:
    """Yields what is wrong with the options of a record that take one of some words."""
    for entry in fields(values):
        if entry.name in CHOICES:
            yield from wrong_word(f"{record}.{entry.name}", getattr(values, entry.name), CHOICES[entry.name])


def wrong_word(name: str, option: Any, words: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with an option that takes one of some words."""
    if option not in words:
        yield f"{name}={shown(option)} is unknown: choose one of {', '.join(words)}"


def wrong_count(name: str, option: Any, most: int = MOST_RANKS, word: str = "") -> Iterator[str]:
    """Yields what is wrong with an option that counts something; a word in place of a number is named beside it."""
    if type(option) is not int or not 1 <= option <= most:
        either = f" or {word!r}" if word else ""
        yield f"{name} must be an integer from 1 to {most}{either}, got {shown(option)}"


def wrong_switch(name: str, option: Any) -> Iterator[str]:
    """Yields what is wrong with an option that is on or off."""
    if type(option) is not bool:
        yield f"{name} must be True or False, got {shown(option)}"


def by_path(option: str, values: Any, kinds: tuple[type, ...], what: str) -> Iterator[str]:
    """Yields what is wrong with an option that says something of each of some inputs."""
    if not isinstance(values, Mapping):
        yield f"{option} must be a mapping from paths of inputs, as {{'labels': …}}, got {shown(values)}"
        return
    for path, value in values.items():
        if not isinstance(path, str) or not path:
            yield f"{option} has the key {shown(path)}: write an input's path, as labels or batch.0"
        if type(value) not in kinds or value != value:
            yield f"{option}[{shown(path)}] must be a {what}, got {shown(value)}"


def globs(option: str, values: Any, what: str) -> Iterator[str]:
    """Yields what is wrong with an option that names some things by globs."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(glob, str) and glob for glob in values):
        yield f"{option} must be a list of globs on names of {what}, got {shown(values)}"


# Options as lines of YAML.


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: plain YAML lets the last line win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping whose keys differ."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


def read_mapping(text: Any, where: str) -> dict[Any, Any]:
    """Returns what a text holds; nothing where it is empty.

    Args:
        where: the text comes from, for errors.

    Raises:
        PlanError: it is no YAML, or no mapping.
    """
    if not isinstance(text, (str, bytes)):
        raise PlanError(f"must be a text, got {shown(text)}", where=where, remedy="Plan.load reads a file")
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:  # of scalars and keys that are none
        reason = str(error).splitlines()[0]
        raise PlanError(f"not YAML: {reason}", where=where, remedy="write lines such as 'tp: 2'") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PlanError("the file holds no mapping", where=where, remedy="write lines such as 'tp: 2'")
    return values


def group(name: str, values: Any, kind: type[OptionGroup], where: str) -> OptionGroup:
    """Returns a record of options.

    Args:
        name: of the option in the plan.
        values: what a file says of it; an unchanged record stays.

    Raises:
        PlanError: no mapping, or an unknown option.
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        options = ", ".join(entry.name for entry in fields(kind))
        remedy = f"write '{name}: {{OPTION: VALUE}}' of its options {options}"
        raise PlanError(f"{name} must be a mapping, got {shown(values)}", where=where, remedy=remedy)
    check_known(values, kind, f"{where}: {name}")
    return kind(**values)


def check_known(values: Mapping[str, Any], kind: type, where: str) -> None:
    """Refuses what is no option.

    Raises:
        PlanError: names it, and those that there are.
    """
    known = [entry.name for entry in dataclasses.fields(kind)]
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise PlanError(f"unknown option {', '.join(unknown)}", where=where, remedy=f"choose from {', '.join(known)}")


def fault(error: Exception) -> str:
    """Returns what went wrong with a file."""
    return getattr(error, "strerror", None) or str(error)
