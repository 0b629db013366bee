"""How many rows experts receive, and for how many a buffer has no place, as outputs of a program.

Enters: names. Leaves: which outputs those are, and of which module. Of the first a rank has the numbers of its own
experts, i64 [leading dimensions, experts of a holder], of the second the most of its blocks, i64 [leading dimensions,
1].
"""

from __future__ import annotations

from collections.abc import Sequence

_LOAD = "fxpar.load."
_EXCESS = "fxpar.excess."


def load_name(module: str, taken: Sequence[str]) -> str:
    """The output that has the load of a module's experts, by another name than those that are taken."""
    name = f"{_LOAD}{module or 'experts'}"
    return name if name not in taken else f"{name}#{sum(each.startswith(name) for each in taken)}"


def is_load(output: str) -> bool:
    """Whether an output of that name is a load."""
    return output.startswith(_LOAD)


def excess_name(load: str) -> str:
    """The output that says for how many rows of that load there is no place."""
    return f"{_EXCESS}{module_of_load(load)}"


def is_excess(output: str) -> bool:
    """Whether an output of that name says that."""
    return output.startswith(_EXCESS)


def is_counted(output: str) -> bool:
    """Whether an output is one of these, and none of the model's."""
    return is_load(output) or is_excess(output)


def module_of_load(output: str) -> str:
    """Whose load, or rows without a place, it is."""
    return output.removeprefix(_LOAD).removeprefix(_EXCESS)
