"""What a plan's `split` lines mean for the parameters of a program.

Enters: a program whose plan has overrides. Leaves: for every named parameter its placement, with role and reason; or
an error that names the plan line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from fxpar.errors import PlanError
from fxpar.layout import I, Placement, shard
from fxpar.program import Parameter, Program, operands, tensor_type
from fxpar.rules.follow import Trail, candidates, follow
from fxpar.rules.inference import describe


@dataclass(frozen=True)
class Pin:
    """The placement an override gives a parameter on the tp axis, the role it plays and the line that says so."""

    placement: Placement
    role: str
    origin: str
    product: fx.Node | None = None


def resolve_overrides(program: Program, n: int) -> dict[fx.Node, Pin]:
    """The pins of all overridden parameters, by placeholder.

    Raises:
        PlanError: a glob matches nothing, two lines contradict each other, or a line cannot be carried out.
    """
    asked = _matches(program)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    pins: dict[fx.Node, Pin] = {}
    for parameter, (glob, how) in asked.items():
        if how == "replicate":
            pins[nodes[parameter.node]] = Pin(I, "", f"plan: {glob} = {how}")
        elif len(parameter.type.shape) > 1:
            pins[nodes[parameter.node]] = _pin_matrix(nodes[parameter.node], parameter, glob, how, n)
    for parameter, (glob, how) in asked.items():
        if how != "replicate" and len(parameter.type.shape) < 2:
            pins[nodes[parameter.node]] = _pin_vector(nodes[parameter.node], parameter, glob, how, pins)
    return pins


def _matches(program: Program) -> dict[Parameter, tuple[str, str]]:
    found: dict[Parameter, tuple[str, str]] = {}
    split: Mapping[str, str] = program.plan.split
    owned = [p for p in program.parameters if p.kind == "parameter"]
    for glob, how in split.items():
        exact = [p for p in owned if any(fnmatchcase(name, glob) for name in (p.fqn, *p.tied))]
        modules = [p for p in owned if any(fnmatchcase(n.rpartition(".")[0], glob) for n in (p.fqn, *p.tied))]
        if not exact and not modules:
            names = ", ".join(sorted({p.fqn.rpartition(".")[0] for p in owned})[:6])
            raise PlanError(
                "matches no module and no parameter", where=f"split[{glob!r}]", remedy=f"names look like {names}, …"
            )
        for parameter in {*exact, *modules}:
            known = found.get(parameter)
            if known is not None and known[1] != how:
                raise PlanError(
                    f"says {how}, but split[{known[0]!r}] says {known[1]}, of {parameter.fqn}",
                    where=f"split[{glob!r}]",
                    remedy="narrow one of the globs",
                )
            found[parameter] = (glob, how)
    return dict(sorted(found.items(), key=lambda item: owned.index(item[0])))


def _pin_matrix(node: fx.Node, parameter: Parameter, glob: str, how: str, n: int) -> Pin:
    """The dimension that has the role, cut so that nothing downstream tears it."""
    where, role = f"split[{glob!r}]", "column" if how == "head" else how
    shape = tensor_type(node).shape
    dims = [d for d in range(len(shape)) if follow(node, shard(d, shape[d]), 1).role == role]
    if not dims:
        raise PlanError(
            f"{parameter.fqn} is used in no matrix product that it could split by {how}",
            where=where,
            remedy="leave it out of the plan",
        )
    best: tuple[int, int, Placement, Trail] | None = None
    for order, placement in enumerate(candidates(node, dims[0])):
        trail = follow(node, placement, n)
        rank = (len(trail.refused) + 1000 * len(trail.torn), order)
        if best is None or rank < best[:2]:
            best = (*rank, placement, trail)
    assert best is not None
    _, _, placement, trail = best
    if trail.torn:
        first = follow(node, shard(dims[0], shape[dims[0]]), n).torn or trail.torn
        torn, refusal = first[0]
        raise PlanError(
            f"{parameter.fqn} cannot be split by {how} over {n} ranks: at {describe(torn)} {refusal.reason}",
            where=where,
            remedy=f"choose a tp that divides it (heads, features), or split[{glob!r}] = 'replicate'",
        )
    if how == "head" and not trail.factored:
        raise PlanError(
            f"no view makes heads of the output of {parameter.fqn}", where=where, remedy="use 'column' instead"
        )
    return Pin(placement, how, f"plan: {glob} = {how}", trail.product)


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
