"""What a plan's `split` lines mean for the parameters of a program.

Enters: a program whose plan has overrides. Leaves: for every named parameter its placement, with role and reason; or
an error that names the plan line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import fx

from fxpar.errors import PlanError
from fxpar.layout import I, Placement, shard
from fxpar.program import Parameter, Program, operands, tensor_type
from fxpar.rules.follow import Arrived, Trail, candidates, follow
from fxpar.rules.inference import describe


@dataclass(frozen=True)
class Pin:
    """The placement an override gives a parameter on the tp axis, the role it plays and the line that says so."""

    placement: Placement
    role: str
    origin: str
    product: fx.Node | None = None


Lines = Mapping[Parameter, tuple[str, str]]


def resolve_overrides(program: Program, lines: Lines, n: int) -> dict[fx.Node, Pin]:
    """The pins of all overridden parameters, by placeholder, on an axis of n ranks.

    Raises:
        PlanError: a line cannot be carried out.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    pins: dict[fx.Node, Pin] = {}
    arrived: dict[fx.Node, tuple[Placement, ...]] = {}
    # Rows last: their cut must be that of the values which column splits send them.
    for parameter, (glob, how) in sorted(lines.items(), key=lambda item: item[1][1] == "row"):
        node = nodes[parameter.node]
        if how == "replicate":
            pins[node] = Pin(I, "", f"plan: {glob} = {how}")
        elif len(parameter.type.shape) > 1:
            pins[node], seen = _pin_matrix(node, parameter, (glob, how), n, arrived)
            arrived = {**seen, **arrived}
    for parameter, (glob, how) in lines.items():
        if how != "replicate" and len(parameter.type.shape) < 2:
            pins[nodes[parameter.node]] = _pin_vector(nodes[parameter.node], parameter, glob, how, pins)
    return pins


def match_lines(program: Program) -> Lines:
    """Glob and split for each parameter: of the line that names it itself, else of the one that names its module.

    Raises:
        PlanError: a glob matches nothing, two lines contradict each other, or other lines leave nothing to one.
    """
    owned = [p for p in program.parameters if p.kind == "parameter"]
    lines: dict[Parameter, tuple[list[str], list[str]]] = {p: ([], []) for p in owned}
    split: Mapping[str, str] = program.plan.split
    for glob in split:
        for parameter in owned:
            names = (parameter.fqn, *parameter.tied)
            if any(fnmatchcase(name, glob) for name in names):
                lines[parameter][0].append(glob)
            elif any(fnmatchcase(name.rpartition(".")[0], glob) for name in names):
                lines[parameter][1].append(glob)
        if not any(glob in exact or glob in modules for exact, modules in lines.values()):
            shown = ", ".join(sorted({p.fqn.rpartition(".")[0] for p in owned})[:6])
            raise PlanError(
                "matches no module and no parameter", where=f"split[{glob!r}]", remedy=f"names look like {shown}, …"
            )
    found, consumed = {}, set()
    for parameter, (exact, modules) in lines.items():
        consumed |= set(exact or modules)
        first, *others = sorted(exact or modules) or [""]
        for other in others:
            if split[other] != split[first]:
                raise PlanError(
                    f"says {split[other]}, but split[{first!r}] says {split[first]}, of {parameter.fqn}",
                    where=f"split[{other!r}]",
                    remedy="narrow one of the globs",
                )
        if first:
            found[parameter] = (first, split[first])
    for glob in sorted(split.keys() - consumed):
        raise PlanError(
            "says nothing: other lines name all its parameters themselves",
            where=f"split[{glob!r}]",
            remedy="remove it, or narrow the other lines",
        )
    return found


def _pin_matrix(
    node: fx.Node, parameter: Parameter, line: tuple[str, str], n: int, arrived: Arrived
) -> tuple[Pin, Arrived]:
    """The dimension that has the role, cut so that nothing downstream tears it; and where the shard goes."""
    glob, how = line
    where, role = f"split[{glob!r}]", "column" if how == "head" else how
    shape = tensor_type(node).shape
    dims = [d for d in range(len(shape)) if follow(node, shard(d, shape[d]), 1).role == role]
    if not dims:
        raise PlanError(
            f"{parameter.fqn} is used in no matrix product that it could split by {how}",
            where=where,
            remedy="leave it out of the plan",
        )
    tried = [(placement, follow(node, placement, n, arrived)) for placement in candidates(node, dims[0])]
    costs = [_unfitness(trail, how) for _, trail in tried]
    placement, trail = tried[costs.index(min(costs))]
    if min(costs) >= _UNFIT:
        _refuse_matrix([trail for _, trail in tried], parameter, line, n)
    return Pin(placement, how, f"plan: {glob} = {how}", trail.product), trail.seen


_UNFIT = 1000


def _unfitness(trail: Trail, how: str) -> int:
    """How many operations refuse a cut; `_UNFIT` for each reason for which it cannot be."""
    unfit = len(trail.torn) + (how == "head" and not trail.factored) + (trail.inner and bool(trail.refused))
    return len(trail.refused) + _UNFIT * unfit


def _refuse_matrix(trails: Sequence[Trail], parameter: Parameter, line: tuple[str, str], n: int) -> NoReturn:
    """Tells of the cut between heads that came farthest: what stopped it stops all the others too."""
    glob, how = line
    where = f"split[{glob!r}]"
    torn = [trail.torn[0] for trail in trails if trail.torn and not trail.inner]
    torn = torn or [trail.torn[0] for trail in trails if trail.torn]
    if not torn or not (trails[0].torn or trails[0].factored):
        raise PlanError(
            f"no view makes heads of the output of {parameter.fqn}", where=where, remedy="use 'column' instead"
        )
    order = {other: i for i, other in enumerate(torn[0][0].graph.nodes)}
    user, refusal = max(torn, key=lambda item: order[item[0]])
    raise PlanError(
        f"{parameter.fqn} cannot be split by {how} over {n} ranks: at {describe(user)} {refusal.reason}",
        where=where,
        remedy=f"choose a tp that divides it (heads, features), or split[{glob!r}] = 'replicate'",
    )


def _pin_vector(node: fx.Node, parameter: Parameter, glob: str, how: str, pins: Mapping[fx.Node, Pin]) -> Pin:
    """A bias follows the matrix whose product it is added to: cut alike by column, whole by row."""
    origin = f"plan: {glob} = {how}"
    products = {pin.product: pin for pin in pins.values() if pin.product is not None}
    for user in node.users:
        for other in operands(user):
            pin = products.get(other)
            if pin is not None and other is not node:
                if pin.role == "row":
                    return Pin(I, "row", origin)
                return Pin(pin.placement.at(0), pin.role, origin)
    raise PlanError(
        f"{parameter.fqn} is no bias of a split matrix, so {how} says nothing of it",
        where=f"split[{glob!r}]",
        remedy="narrow the glob",
    )
