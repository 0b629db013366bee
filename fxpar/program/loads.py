"""How many rows experts receive, as outputs of a program.

Enters: names. Leaves: which outputs those are, and of which module. A rank has the numbers of its own experts:
i64 [leading dimensions, experts of a holder].
"""

from __future__ import annotations

from collections.abc import Sequence

_LOAD = "fxpar.load."


def load_name(module: str, taken: Sequence[str]) -> str:
    """The output that has the load of a module's experts, by another name than those that are taken."""
    name = f"{_LOAD}{module or 'experts'}"
    return name if name not in taken else f"{name}#{sum(each.startswith(name) for each in taken)}"


def is_load(output: str) -> bool:
    """Whether an output of that name is a load."""
    return output.startswith(_LOAD)


def module_of_load(output: str) -> str:
    """Whose load it is."""
    return output.removeprefix(_LOAD)
