"""A step compiled for the shapes of one call.

Enters: a step and values. Leaves: its forward and its backward as functions that Inductor has made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fxpar.runtime.inductor import Inductor
from fxpar.runtime.parts import Step


class CompiledStep:
    """Forward and backward of a step.

    Args:
        names: the program's inputs that it reads.
        values: of these, of the shapes it is compiled for.
        whole: whether the parameter phase belongs to the backward.
    """

    def __init__(
        self, inductor: Inductor, step: Step, names: Sequence[str], values: Sequence[Tensor], whole: bool
    ) -> None:
        self._step, self._names = step, tuple(names)
        self._backward_part = step.whole_backward if whole else step.backward
        self.gives = tuple(step.gradients.values()) if whole else step.held
        made = set(step.forward.outputs)
        self._results = tuple(dict.fromkeys(value for value in step.results.values() if value in made))
        self._tangents = tuple(step.tangents)
        self._run: Any = self._pair(inductor, values) if not step.recomputes else self._apart(inductor, values)

    def _pair(self, inductor: Inductor, values: Sequence[Tensor]) -> Any:
        """Cut where least is kept."""

        def forward(given: Sequence[Tensor]) -> Sequence[Any]:
            env = dict(zip(self._names, given, strict=True))
            self._step.forward(env)
            forward_env.append(env)
            return [env[name] for name in self._results]

        def backward(given: Sequence[Tensor], found: Sequence[Any], tangents: Sequence[Tensor]) -> Sequence[Any]:
            env = forward_env[-1]
            env.update(zip(self._step.tangents.values(), tangents, strict=True))
            self._backward_part(env)
            return [env[name] for name in self.gives]

        forward_env: list[dict[str, Any]] = []
        indices = [self._results.index(self._step.results[name]) for name in self._tangents]
        return inductor.pair(forward, backward, values, indices)

    def _apart(self, inductor: Inductor, values: Sequence[Tensor]) -> Any:
        """Cut where the author said."""
        part = self._backward_part
        saved = [name for name in part.inputs if name not in self._step.tangents.values()]

        def forward(*given: Tensor) -> Sequence[Any]:
            env = dict(zip(self._names, given, strict=True))
            self._step.forward(env)
            return [env[name] for name in (*self._results, *saved)]

        def backward(*given: Tensor) -> Sequence[Any]:
            env = dict(zip((*saved, *self._step.tangents.values()), given, strict=True))
            part(env)
            return [env[name] for name in self.gives]

        run = inductor.function(forward, values, backward=False)
        count, late = len(self._results), list[Any]()

        def first(inputs: list[Any]) -> Sequence[Any]:
            found = run(inputs)
            return [*found[:count], list(found[count:])]

        def second(inputs: list[Any]) -> Sequence[Any]:
            if not late:
                late.append(inductor.function(backward, inputs, backward=True))
            found: Sequence[Any] = late[0](inputs)
            return found

        return first, second

    def forward(self, sources: Mapping[str, Any], given: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """The model's outputs by name, and what the backward takes before the tangents."""
        *found, saved = self._run[0](given)
        made = dict(zip(self._results, found, strict=True))
        outputs = {name: made[value] if value in made else sources[value] for name, value in self._step.results.items()}
        return outputs, saved

    def backward(self, saved: list[Any], tangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the backward gives, by name of the value."""
        saved += [tangents[name] for name in self._tangents]
        return dict(zip(self.gives, self._run[1](saved), strict=True))
