"""Options of a plan as fields: which there are, which differ from the defaults, and what is wrong with a mapping.

Enters: a dataclass or the values of one. Leaves: its fields, or what is wrong with them. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fxpar.errors import PlanError, shown


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
