"""How many rows experts receive, for how many a buffer has no place, and how many are dropped: outputs of a program.

Enters: names. Leaves: which outputs those are, and of which module. Of the first a rank has the numbers of its own
experts, i64 [leading dimensions, experts of a holder], of the second the most of its blocks, i64 [leading dimensions,
1], of the third those of its own tokens, i64 [leading dimensions].
"""

from __future__ import annotations

from collections.abc import Sequence

_LOAD = "fxpar.load."
_EXCESS = "fxpar.excess."
_DROPPED = "fxpar.dropped."


def load_name(module: str, taken: Sequence[str]) -> str:
    """The output that has the load of a module's experts, by another name than those that are taken."""
    name = f"{_LOAD}{module or 'experts'}"
    return name if name not in taken else f"{name}#{sum(other.startswith(name) for other in taken)}"


def is_load(output: str) -> bool:
    """Whether an output of that name is a load."""
    return output.startswith(_LOAD)


def excess_name(load: str) -> str:
    """The output that says for how many rows of that load there is no place."""
    return f"{_EXCESS}{module_of_load(load)}"


def is_excess(output: str) -> bool:
    """Whether an output of that name says that."""
    return output.startswith(_EXCESS)


def dropped_name(load: str) -> str:
    """The output that says how many rows were dropped that would have been of that load."""
    return f"{_DROPPED}{module_of_load(load)}"


def is_dropped(output: str) -> bool:
    """Whether an output of that name says that."""
    return output.startswith(_DROPPED)


def is_counted(output: str) -> bool:
    """Whether an output is one of these, and none of the model's."""
    return is_load(output) or is_excess(output) or is_dropped(output)


def module_of_load(output: str) -> str:
    """Whose load, rows without a place, or dropped ones, it is."""
    return output.removeprefix(_LOAD).removeprefix(_EXCESS).removeprefix(_DROPPED)
