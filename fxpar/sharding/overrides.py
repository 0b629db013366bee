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
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.operators import as_parameter
from fxpar.ir.program import Parameter, Program, describe, operands, tensor_type
from fxpar.layout.layout import I, Placement
from fxpar.sharding.parameter_cuts import all_cuts, candidates
from fxpar.sharding.shard_propagation import Arrived, Trail, Weights, follow


@dataclass(frozen=True)
class Pin:
    """The placement an override gives a parameter on the tp axis, the role it plays and the line that says so.

    Attributes:
        product: the matrix product that has the role.
        products: all matrix products of the parameter, to which biases are added.
    """

    placement: Placement
    role: str
    origin: str
    product: fx.Node | None = None
    products: tuple[fx.Node, ...] = ()


Lines = Mapping[Parameter, tuple[str, str]]


def resolve_overrides(
    program: Program, lines: Lines, n: int, known: Mapping[str, Placement] | None = None
) -> dict[fx.Node, Pin]:
    """The pins of all overridden parameters, by placeholder, on an axis of n ranks.

    A parameter that no operation uses stays whole.

    Args:
        known: placements that parameters have already, by name: they are kept, and parameters without one stay whole.

    Raises:
        PlanError: a line cannot be carried out, or is about unused parameters alone.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    if known:
        owned = [p for p in program.parameters if p.kind == "parameter"]
        return {nodes[p.node]: _known_pin(known.get(p.fqn, I), lines.get(p)) for p in owned}
    weights = Weights(weights_of(program.graph, [nodes[p.node] for p in program.parameters]))
    pins: dict[fx.Node, Pin] = {}
    arrived: Arrived = {}
    used = _used(lines, nodes)
    # Rows last: their cut must be that of the values which column splits send them.
    for parameter, (glob, how) in sorted(used.items(), key=lambda item: item[1][1] == "row"):
        node = nodes[parameter.node]
        if how == "replicate":
            pins[node] = Pin(I, "", f"plan: {glob} = {how}")
        elif len(parameter.type.shape) > 1:
            pins[node], seen = _pin_matrix(node, parameter, (glob, how), n, weights, arrived)
            arrived = {**seen, **arrived}
    for parameter, line in used.items():
        if line[1] != "replicate" and len(parameter.type.shape) < 2:
            pins[nodes[parameter.node]] = _pin_vector(nodes[parameter.node], parameter, line, n, weights, arrived, pins)
    return pins


def _known_pin(placement: Placement, line: tuple[str, str] | None) -> Pin:
    pinned = placement if placement.is_shard else I
    if line is None:
        return Pin(pinned, "", "as in the module's first program")
    return Pin(pinned, "" if line[1] == "replicate" else line[1], f"plan: {line[0]} = {line[1]}")


def _used(lines: Lines, nodes: Mapping[str, fx.Node]) -> Lines:
    """The lines of the parameters that some operation uses."""
    used = {parameter: line for parameter, line in lines.items() if nodes[parameter.node].users}
    for parameter, (glob, how) in lines.items():
        if how != "replicate" and glob not in {other for other, _ in used.values()}:
            raise PlanError(
                f"no operation uses {parameter.fqn}", where=f"split[{glob!r}]", remedy="leave it out of the plan"
            )
    return used


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
    matches, consumed = {}, set()
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
            matches[parameter] = (first, split[first])
    for glob in sorted(split.keys() - consumed):
        raise PlanError(
            "says nothing: other lines name all its parameters themselves",
            where=f"split[{glob!r}]",
            remedy="remove it, or narrow the other lines",
        )
    return matches


def _pin_matrix(
    node: fx.Node, parameter: Parameter, line: tuple[str, str], n: int, weights: Weights, arrived: Arrived
) -> tuple[Pin, Arrived]:
    """The dimension that has the role, cut so that nothing downstream tears it; and where the shard goes."""
    glob, how = line
    role = "column" if how == "head" else how
    dims = [d for d in range(len(tensor_type(node).shape)) if role in _roles(node, d, weights)]
    if not dims:
        raise PlanError(
            f"{parameter.fqn} is used in no {'lookup or loss' if how == 'vocab' else 'matrix product'} that it could "
            f"split by {how}",
            where=f"split[{glob!r}]",
            remedy="leave it out of the plan",
        )
    cuts = all_cuts(node, dims[0], weights, n)
    tried = [(placement, follow(node, placement, n, weights, arrived)) for placement in cuts]
    costs = [_unfitness(trail, how) for _, trail in tried]
    placement, trail = tried[costs.index(min(costs))]
    if min(costs) >= _UNFIT:
        _refuse_matrix([trail for _, trail in tried], parameter, line, n)
    return Pin(as_parameter(placement), how, f"plan: {glob} = {how}", trail.product, tuple(trail.products)), trail.seen


def _roles(node: fx.Node, dim: int, weights: Weights) -> set[str]:
    """The roles of a dimension: some cut of it reaches a product, where others are torn on the way (a fused weight)."""
    for placement in candidates(node, dim, 1, weights):
        trail = follow(node, placement, 1, weights)
        roles = {"vocab"} if trail.vocabulary else set()
        if trail.role or roles:
            return {trail.role} | roles
    return set()


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


def _pin_vector(
    node: fx.Node,
    parameter: Parameter,
    line: tuple[str, str],
    n: int,
    weights: Weights,
    arrived: Arrived,
    pins: Mapping[fx.Node, Pin],
) -> Pin:
    """A bias follows the matrix whose product it is added to: cut alike by column, whole by row."""
    glob, how = line
    pin = _meets(node, weights, {product: pin for pin in pins.values() for product in pin.products})
    if pin is None:
        raise PlanError(
            f"{parameter.fqn} is no bias of a split matrix, so {how} says nothing of it",
            where=f"split[{glob!r}]",
            remedy="narrow the glob",
        )
    if pin.role == "row":
        return Pin(I, "row", f"plan: {glob} = {how}")
    cuts = list(all_cuts(node, 0, weights, n))
    if tensor_type(node).shape[0] == sum(piece.length for piece in pin.placement.pieces):
        cuts.insert(0, pin.placement.at(0))
    trails = [follow(node, placement, n, weights, arrived) for placement in cuts]
    # What refuses the sum, further on, refuses the matrix.
    costs = [sum(not trail.weights.isdisjoint(operands(user)) for user, _ in trail.refused) for trail in trails]
    return Pin(as_parameter(cuts[costs.index(min(costs))]), pin.role, f"plan: {glob} = {how}")


def _meets(node: fx.Node, weights: Weights, products: Mapping[fx.Node, Pin]) -> Pin | None:
    """The pin of the first product that meets the vector, or a part or view of it."""
    pending = [node]
    for current in pending:
        for user in current.users:
            pin = next((products[other] for other in operands(user) if other in products and other != current), None)
            if pin is not None:
                return pin
            if user in weights and user not in pending:
                pending.append(user)
    return None
