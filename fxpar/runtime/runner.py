"""Runs a module's programs: finds what each takes among the weights, the call's inputs and the random state.

Enters: a module, and calls that are bound to their programs. Leaves: the outputs by name, to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.program.program import Parameter
from fxpar.runtime.mains import Copies
from fxpar.runtime.programs import Call
from fxpar.runtime.randomness import RandomState
from fxpar.runtime.step import Microbatch
from fxpar.state.sharded import Sharded
from fxpar.state.sharded_parameter import leaf_of


class Runner:
    """Runs programs on the weights that a module has at each call.

    Args:
        module: has its parameters and buffers by now.
        shape_of: whole shape of each by name.
        copies: of its main values, on which programs run in mixed precision.
        random: the state of calls that are no microbatch.
    """

    def __init__(
        self,
        module: nn.Module,
        shape_of: Callable[[str], tuple[int, ...]],
        copies: Copies | None,
        random: RandomState,
        device: torch.device,
    ) -> None:
        self._module, self._shape_of, self._copies = module, shape_of, copies
        self._random, self._device = random, device
        self._cut = frozenset(name for name, value in _tensors(module).items() if isinstance(value, Sharded))

    def outputs(self, call: Call, wanted: tuple[str, ...], microbatch: Microbatch | None = None) -> dict[str, Tensor]:
        """The wanted outputs by name.

        Args:
            microbatch: the call is one of several, whose gradients stay this rank's own.

        Raises:
            InputError: autocast is on, a parameter was exchanged or is trainable since, or `step` is no number.
        """
        program, lowered = call.compiled.program, call.ready.lowered
        if torch.is_autocast_enabled(self._device.type):
            raise InputError(
                "would change the element types of the program", where="autocast", remedy="use Plan(precision=…)"
            )
        tensors = _tensors(self._module)
        values: dict[str, Tensor] = {}
        for parameter in program.parameters:
            is_constant = parameter.kind == "constant"
            constants = call.compiled.constants
            value = constants[parameter.fqn] if is_constant else self._held(parameter.fqn, tensors)
            _check_frozen(parameter, value)
            values[parameter.node] = leaf_of(value)
        for entry in program.inputs:
            if entry.path != RNG_PATH:
                values[entry.node] = call.inputs[entry.path]
            else:
                values[entry.node] = self._random.draw() if microbatch is None else microbatch.random_state
        ordered = [values[name] for name in lowered.inputs]
        if self._copies is not None:
            names = {p.node: p.fqn for p in program.parameters}
            mains = {names[node]: tensors[names[node]] for node in lowered.copies}
            ordered += self._copies.current(mains, self._module.training)
        with self._random.own_generator() if lowered.draws else nullcontext():
            run = call.ready.run if microbatch is None else call.ready.local
            return run(tuple(call.sizes.items()), wanted, (*ordered, *call.places))

    def gradients(self, call: Call, name: str) -> list[Tensor | None]:
        """An output, and this rank's own gradients of it, with the bits of a step that is not counted.

        Raises:
            InputError: as `outputs`.
        """
        state = self._random.peek()
        leaves = [leaf for value in self._module.parameters() if (leaf := leaf_of(value)).requires_grad]
        value = self.outputs(call, (name,), Microbatch(0, 1, state))[name]
        found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
        return [value.detach(), *found]

    def _held(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A parameter or buffer, if it is the module's own still."""
        value = tensors.get(name)
        if value is None or isinstance(value, Sharded) != (name in self._cut) or value.shape != self._shape_of(name):
            raise InputError(
                "is not the tensor that the module was made with",
                where=name,
                remedy="copy values into it under torch.no_grad(), or change the model before parallelize",
            )
        return value


def _check_frozen(parameter: Parameter, value: Tensor) -> None:
    if value.requires_grad and not parameter.trainable:
        raise InputError(
            "was frozen when the model was split, so the ranks' gradients of it would not be added",
            where=parameter.fqn,
            remedy="parallelize the model with it trainable, and freeze it afterwards",
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}
