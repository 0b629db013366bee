"""The static verifiers, each with the properties under which it applies.

Enters: a program. Leaves: nothing, or the first failure. They run after every pass of the manager, and in one line from
a test: `verify_static(program)`.
"""

from __future__ import annotations

from fxpar.manager import Verifier
from fxpar.program.program import Program
from fxpar.program.properties import Property
from fxpar.program.regions import inlined
from fxpar.signatures.check_cache import facts_of
from fxpar.verify.buffers import check_buffers
from fxpar.verify.header import check_header
from fxpar.verify.operations import check_operations
from fxpar.verify.shapes import check_shapes
from fxpar.verify.stage_dataflow import check_stages
from fxpar.verify.step_backward import check_step
from fxpar.verify.structure import check_structure
from fxpar.verify.types import check_choice, check_types

STATIC: tuple[Verifier, ...] = (
    Verifier("header", frozenset(), check_header, uses_facts=True),
    Verifier("structure", frozenset(), check_structure, uses_facts=True),
    Verifier("operations", frozenset(), check_operations, of_operations=True, uses_facts=True),
    Verifier("choice", frozenset({Property.LAYOUTS}), check_choice, until=Property.COLLECTIVES, uses_facts=True),
    # Types come first: they say which coercion a wrong shape lacks.
    Verifier("types", frozenset({Property.COLLECTIVES}), check_types, of_operations=True, uses_facts=True),
    Verifier("shapes", frozenset(), check_shapes, of_operations=True, uses_facts=True),
    Verifier("stages", frozenset({Property.STAGES}), check_stages),
    Verifier("buffers", frozenset({Property.STEP}), check_buffers),
    Verifier("step", frozenset({Property.STEP}), check_step, of_dataflow=True),
)


def verify_static(program: Program) -> tuple[str, ...]:
    """Runs every static check whose properties hold, and returns their names.

    Raises:
        CheckFailed, LayoutError: the first failure.
        InputError: the program names an autograd function that cannot be imported.
    """
    program = inlined(program)
    facts = facts_of(program)
    applied = [verifier for verifier in STATIC if verifier.applies(program)]
    for verifier in applied:
        verifier.judge(facts)
    return tuple(verifier.name for verifier in applied)
