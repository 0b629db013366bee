"""Operators of fxpar as graphs name them: the targets of nodes.

Enters: nothing. Leaves: what a graph knows of its own operators. They have no rank, group or address, therefore they
cannot run; their records (`fxpar.ops`) say what they do to layouts and shapes, and what a rank runs in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, eq=False)
class GraphOperator:
    """An operator of fxpar as the target of a node; each is equal to itself alone.

    Attributes:
        stub: a function whose name, signature and docstring are the operator's; it is never called.
        stops_gradient: whether the results ignore the operands' values, so that no gradient flows through them.
        sums_gradients: whether values stay as they are and the ranks' gradients are summed: of parameters, in the main
            type, once a step.
    """

    stub: Callable[..., Any]
    _: KW_ONLY
    stops_gradient: bool = False
    sums_gradients: bool = False

    @property
    def __name__(self) -> str:
        return self.stub.__name__

    @property
    def signature(self) -> inspect.Signature:
        """Names and defaults of the arguments; the mesh axis, where it takes one, by name alone."""
        return inspect.signature(self.stub)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """FX takes callables alone for targets.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self} is a graph operator without a process group: lower the program first")

    def __repr__(self) -> str:
        return f"fxpar.{self.__name__}"
