"""The static verifiers, each with the properties under which it applies.

Enters: a program. Leaves: nothing, or the first failure. They run after every pass of the manager, and in one line from
a test: `verify_static(program)`.
"""

from __future__ import annotations

from fxpar.manager import Verifier
from fxpar.program import Program
from fxpar.verify.shapes import check_shapes
from fxpar.verify.structure import check_structure
from fxpar.verify.types import check_choice, check_types

STATIC: tuple[Verifier, ...] = (
    Verifier("structure", frozenset(), check_structure),
    Verifier("choice", frozenset({"layouts"}), check_choice),  # until coercions are in place
    Verifier("types", frozenset({"collectives"}), check_types),  # says which coercion a wrong shape lacks
    Verifier("shapes", frozenset(), check_shapes),
)


def verify_static(program: Program) -> None:
    """Runs every static check whose properties hold.

    Raises:
        CheckFailed, LayoutError: the first failure.
    """
    for verifier in STATIC:
        if verifier.properties <= program.properties:
            verifier.check(program)
