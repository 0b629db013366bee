"""Buffers that a forward writes: their new values are outputs of a program, by name.

Enters: names of buffers and of outputs. Leaves: which outputs are new values of buffers, and of which. A new value is
whole on every rank, as the buffer is; who runs the program copies it into the buffer once a microbatch.
"""

from __future__ import annotations

from fxpar.program.program import Program

_BUFFER = "fxpar.buffer."


def buffer_name(fqn: str) -> str:
    """The name of the output that is the new value of a buffer."""
    return f"{_BUFFER}{fqn}"


def is_buffer(output: str) -> bool:
    """Whether an output of that name is the new value of a buffer."""
    return output.startswith(_BUFFER)


def buffer_of(output: str) -> str:
    """The buffer whose new value an output of that name is."""
    return output.removeprefix(_BUFFER)


def written(program: Program) -> dict[str, str]:
    """Of each buffer that the program writes, by name, the placeholder that has its old value."""
    nodes = {p.fqn: p.node for p in program.parameters}
    return {fqn: nodes[fqn] for fqn in map(buffer_of, filter(is_buffer, program.outputs))}
