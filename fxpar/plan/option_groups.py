"""Options of a plan as fields: which there are, which differ from the defaults, and what is wrong with a mapping.

Enters: a dataclass or the values of one. Leaves: its fields, or what is wrong with them. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import yaml

from fxpar.errors import PlanError, shown

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

# What of a step is replayed as CUDA graphs.

IMPLEMENTATIONS = ("none", "partial", "transformer_engine", "full_iteration")
SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")

_MOST_VARIANTS = 10000


@dataclass(frozen=True)
class CudaGraphs:
    """CUDA graphs: kernels of a step are recorded once and launched together, so that the host is out of the way.

    Attributes:
        impl: `none`; `partial`, a graph for each region that can be captured, forward and backward (`fxpar regions`
            lists them); `transformer_engine`, the forward and the backward captured by its `make_graphed_callables`,
            where nothing in them ends a graph;
            `full_iteration`, forward and backward of all microbatches of a `train_step`, and the reductions of
            gradients, in one graph.
        scope: of `partial`, the parts of layers that are captured: `attn` (norm, attention and the residual sum), `mlp`
            (norm, MLP and its sum); all that can be, where none is named.
        variants: graphs that are kept at most, one for each set of shapes, addresses and modes. A call that would need
            another one is refused.
    """

    impl: str = "none"
    scope: tuple[str, ...] = ()
    variants: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.scope, (list, tuple)) and all(isinstance(name, str) for name in self.scope):
            object.__setattr__(self, "scope", tuple(sorted(set(self.scope))))

    @property
    def is_on(self) -> bool:
        """Whether anything is captured."""
        return self.impl != "none"

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        if self.impl not in IMPLEMENTATIONS:
            yield f"cuda_graphs.impl={shown(self.impl)} is unknown: choose one of {', '.join(IMPLEMENTATIONS)}"
        if type(self.variants) is not int or not 1 <= self.variants <= _MOST_VARIANTS:
            yield f"cuda_graphs.variants={shown(self.variants)} is no number of graphs: give one from 1 on"
        yield from self._wrong_scope()

    def _wrong_scope(self) -> Iterator[str]:
        if not isinstance(self.scope, tuple):
            yield f"cuda_graphs.scope={shown(self.scope)} is no list: write names of {', '.join(SCOPES)}"
            return
        for name in self.scope:
            if name not in SCOPES:
                yield f"cuda_graphs.scope has {shown(name)}: choose from {', '.join(SCOPES)}"
        if self.scope and self.impl != "partial":
            yield f"cuda_graphs.scope is of impl partial, and not of {shown(self.impl)}"
        if "moe_preprocess" in self.scope and "moe_router" not in self.scope:
            yield "cuda_graphs.scope has moe_preprocess, which needs moe_router: name both"
        if "moe" in self.scope and {"moe_router", "moe_preprocess"} & set(self.scope):
            yield "cuda_graphs.scope has moe, which holds moe_router and moe_preprocess: name one or the others"

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, in plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["scope"] = list(self.scope)
        usual: dict[str, Any] = {**{entry.name: entry.default for entry in fields(self)}, "scope": []}
        return {name: value for name, value in values.items() if value != usual[name]}


# What a plan says of how rows travel to their experts.

DISPATCHES = ("static", "allgather", "alltoall", "exact")
DROP_POLICIES = ("probs", "position")


def expert_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the dispatch of a plan."""
    if plan.dispatch not in DISPATCHES:
        return
    yield from _wrong_budget(plan)
    yield from _wrong_capacity(plan)
    if plan.dispatch == "static":
        return
    if plan.ep == 1:
        yield f"dispatch={plan.dispatch!r} is of experts on several ranks, and ep=1: give ep of at least 2"
    if plan.dispatch != "exact":
        return
    if isinstance(plan.cuda_graphs, CudaGraphs) and plan.cuda_graphs.is_on:
        # What stands between graphs has fixed addresses and sizes too (`fxpar.runtime.graphs.partial`).
        yield "dispatch='exact' has sizes that no CUDA graph can hold: leave cuda_graphs out, or give dispatch='static'"
    if plan.compile:
        # Units are compiled for sizes of inputs (`fxpar.runtime.compiled`); rows would be further ones in each layer.
        yield "dispatch='exact' has sizes that the routing decides: give compile=False, or dispatch='static'"


def _wrong_budget(plan: Plan) -> Iterator[str]:
    budget, graphs = plan.receive_budget, plan.cuda_graphs
    if budget is None:
        return
    if type(budget) not in (int, float) or not 1 <= budget < 2**16:
        yield f"receive_budget={shown(budget)} is no multiple of a balanced load: give a number of at least 1"
    elif plan.ep == 1 or plan.dispatch == "exact":
        yield f"receive_budget={budget} is of dispatch='static' with ep of at least 2: choose these, or leave it out"
    if plan.pp > 1:
        # A stage has sent gradients on before the last one knows that rows were too many.
        yield "receive_budget repeats steps, and those of a pipeline are not repeated yet: leave it out, or pp=1"
    if isinstance(graphs, CudaGraphs) and graphs.impl not in ("none", "partial"):
        yield (
            f"receive_budget is asked for on the host in each step, which CudaGraphs({graphs.impl!r}) cannot: "
            "leave it out, or give CudaGraphs('partial')"
        )


def _wrong_capacity(plan: Plan) -> Iterator[str]:
    factor, budget = plan.capacity_factor, plan.receive_budget
    if type(plan.pad_to_capacity) is not bool:
        yield f"pad_to_capacity={shown(plan.pad_to_capacity)} is neither True nor False: write one of them"
    if factor is None:
        options = {"drop_policy": plan.drop_policy != DROP_POLICIES[0], "pad_to_capacity": plan.pad_to_capacity is True}
        for name in (name for name, is_given in options.items() if is_given):
            yield f"{name} is of a capacity_factor: give one, or leave {name} out"
        return
    if type(factor) not in (int, float) or not 0 < factor < 2**16:
        yield f"capacity_factor={shown(factor)} is no multiple of a balanced load: give a number above 0"
        return
    if plan.pad_to_capacity is True and plan.dispatch == "exact":
        yield "dispatch='exact' sends rows alone, and pad_to_capacity others too: leave it out, or dispatch='static'"
    if plan.pad_to_capacity is True and plan.dispatch == "allgather":
        yield "dispatch='allgather' sends tokens, and pad_to_capacity rows: leave it out, or give dispatch='static'"
    if budget is None or type(budget) not in (int, float):
        return
    if plan.pad_to_capacity is True:
        yield "receive_budget and pad_to_capacity both say how many places a buffer has: leave one of them out"
    elif budget >= factor:
        yield (
            f"receive_budget={budget} is no less than capacity_factor={factor}, by which every row that is kept has a "
            "place: leave receive_budget out"
        )


# What a plan says of its pipeline: which stages there are, and in what order they run.

# More ranks than one axis ever had, more stages and microbatches: beyond them there is only a slip of the keyboard.
MOST_RANKS = 4096


def pipeline_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the stages of a plan, and with its schedule."""
    virtual = plan.virtual_stages
    if type(virtual) is not int or not 1 <= virtual <= MOST_RANKS:
        yield f"virtual_stages={shown(virtual)} is no number of stages: give one of at least 1"
        return
    if type(plan.pp) is not int or plan.pp < 1:
        return
    count = plan.pp * virtual
    if plan.pp == 1 and virtual > 1:
        yield f"virtual_stages={virtual} without a pipeline, pp={plan.pp}: give pp of at least 2, or leave them out"
    stages = plan.stages
    if isinstance(stages, Mapping):
        for name, number in stages.items():
            if not isinstance(name, str) or not name:
                yield f"stages has the key {shown(name)}: write the name of a module"
            elif type(number) is not int or not 0 < number < count:
                yield f"stages[{name!r}]={shown(number)} is none of the stages 1 to {count - 1}: give one of these"
        if len({*map(repr, stages.values())}) != len(stages):
            yield "stages gives two modules one stage: each begins once"
    elif not isinstance(stages, (tuple, list)) or any(type(n) is not int or n < 1 for n in stages):
        yield f"stages={shown(stages)} is neither a mapping from modules to stages nor numbers of layers: write one"
    elif stages and len(stages) != count:
        yield f"stages={shown(stages)} has {len(stages)} numbers of layers for {count} stages: give one for each"
    yield from _wrong_schedule(plan)


def _wrong_schedule(plan: Plan) -> Iterator[str]:
    if type(plan.microbatches) is not int or not 1 <= plan.microbatches <= MOST_RANKS:
        yield f"microbatches={shown(plan.microbatches)} is no number of them: give one of at least 1"
    if type(plan.schedule) is not str:
        yield f"schedule={shown(plan.schedule)} is no text: write a name, or a file"
    elif plan.schedule and plan.pp == 1:
        yield f"schedule={shown(plan.schedule)} is of a pipeline, and pp=1: give pp of at least 2, or leave it out"
    if plan.group_size is not None and (type(plan.group_size) is not int or plan.group_size < 1):
        yield f"group_size={shown(plan.group_size)} is no number of microbatches: give one of at least 1"
    elif plan.group_size is not None and plan.virtual_stages == 1:
        yield f"group_size={plan.group_size} is of several stages a rank: give virtual_stages, or leave it out"
    if plan.pp > 1 and isinstance(plan.cuda_graphs, CudaGraphs) and plan.cuda_graphs.is_on:
        yield "cuda_graphs: stages of a pipeline are not captured yet: leave it out, or pp=1"


# What a plan says of what the backward computes again.

RECOMPUTES = ("none", "selective", "full")


def recompute_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the recomputation of a plan."""
    budget = plan.activation_budget
    if budget is None:
        return
    if type(budget) not in (int, float) or not 0 <= budget < 2**63 or (budget > 1 and budget != int(budget)):
        yield f"activation_budget={shown(budget)} is neither a part from 0 to 1 nor a number of bytes: give one"
    elif plan.recompute != "selective":
        yield f"activation_budget={shown(budget)} is of recompute='selective': choose that, or leave it out"


# Options as lines of YAML.


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: plain YAML lets the last line win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


def read_mapping(text: Any, where: str) -> dict[Any, Any]:
    """What a text holds; nothing where it is empty.

    Args:
        where: the text comes from, for errors.

    Raises:
        PlanError: it is no YAML, or no mapping.
    """
    if not isinstance(text, (str, bytes)):
        raise PlanError(f"{shown(text)} is no text", where=where, remedy="Plan.load reads a file")
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


def by_path(option: str, values: Any, kinds: tuple[type, ...], what: str) -> Iterator[str]:
    """What is wrong with an option that says something of each of some inputs."""
    if not isinstance(values, Mapping):
        yield f"{option}={shown(values)} is no mapping from paths of inputs: write {{'labels': …}}"
        return
    for path, value in values.items():
        if not isinstance(path, str) or not path:
            yield f"{option} has the key {shown(path)}: write an input's path, as labels or batch.0"
        if type(value) not in kinds or value != value:
            yield f"{option}[{shown(path)}]={shown(value)} is no {what}: give one"


def globs(option: str, values: Any, what: str) -> Iterator[str]:
    """What is wrong with an option that names some things by globs."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(glob, str) and glob for glob in values):
        yield f"{option}={shown(values)} is no list of globs: write names of {what}"


def fault(error: Exception) -> str:
    """What went wrong with a file."""
    return getattr(error, "strerror", None) or str(error)


def changed(value: Any, default: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from the default's."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: field for name, field in fields.items() if field != getattr(default, name)}


def part(name: str, values: Any, kind: type, example: str, where: str) -> Any:
    """An option that has options of its own.

    Args:
        kind: the dataclass of these.
        example: how a file says it.

    Raises:
        PlanError: no mapping, or an unknown option.
    """
    if not isinstance(values, Mapping):
        raise PlanError(f"{name}={shown(values)} is no mapping", where=where, remedy=f"write '{name}: {example}'")
    check_known(values, kind, f"{where}: {name}")
    return kind(**values)


def check_known(values: Mapping[str, Any], kind: type, where: str) -> None:
    """Refuses what is no option.

    Raises:
        PlanError: names it, and those that there are.
    """
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        raise PlanError(f"unknown option {', '.join(unknown)}", where=where, remedy=f"choose from {', '.join(known)}")
