"""The training step as a program: its phases, and what stands for gradients among its inputs and outputs.

Enters: a program. Leaves: which node is of the forward; the names of gradients. A step takes a *tangent*, the gradient
of what the caller differentiates, for each output that has one, and returns the gradients of parameters and of inputs
that carry one.
"""

from __future__ import annotations

from torch import fx

from fxpar.program.program import Program, has_note, note

BACKWARD, WEIGHT, PARAMETER = "backward", "weight", "parameter"
# `weight`: the part of a backward on which no gradient of an input depends, where that is cut off; `parameter`: what is
# made of gradients once a step.
PHASES = ("", BACKWARD, WEIGHT, PARAMETER)
# Origin of a node of the backward that computes again what the forward has.
RECOMPUTE = "recompute"

_TANGENT = "fxpar.tangent."
_GRADIENT = "fxpar.gradient."
_INPUT_GRADIENT = "fxpar.input_gradient."


def is_forward(node: fx.Node) -> bool:
    """Whether a node is neither of the backward nor of the parameter phase."""
    return not has_note(node) or note(node).phase == ""


def tangent_path(output: str) -> str:
    """The path of the input that is the gradient of an output."""
    return f"{_TANGENT}{output}"


def output_of(path: str) -> str:
    """The output of whose gradient an input is; empty where it is none."""
    return path.removeprefix(_TANGENT) if path.startswith(_TANGENT) else ""


def gradient_name(fqn: str) -> str:
    """The name of the output that is the gradient of a parameter."""
    return f"{_GRADIENT}{fqn}"


def input_gradient_name(path: str) -> str:
    """The name of the output that is the gradient of an input."""
    return f"{_INPUT_GRADIENT}{path}"


def is_gradient(output: str) -> bool:
    """Whether an output of that name is a gradient."""
    return output.startswith((_GRADIENT, _INPUT_GRADIENT))


def is_input_gradient(output: str) -> bool:
    """Whether an output of that name is the gradient of an input."""
    return output.startswith(_INPUT_GRADIENT)


def parameter_gradients(program: Program) -> dict[str, str]:
    """Of each parameter that the step gives a gradient of, the name of the output."""
    names = {gradient_name(p.fqn): p.fqn for p in program.parameters}
    return {names[output]: output for output in program.outputs if output in names}


def model_outputs(program: Program) -> tuple[str, ...]:
    """The outputs that are the model's."""
    return tuple(name for name in program.outputs if not is_gradient(name))
