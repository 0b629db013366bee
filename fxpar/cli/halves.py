"""What the command explain says of two half batches in turn.

Enters: a program before its layouts are chosen. Leaves: the predicted seconds of a microbatch, whole and in halves,
which of them the plan takes, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from fxpar.cli.output import Report, Ui, print_table, table, time_text
from fxpar.program.properties import Property

if TYPE_CHECKING:
    from fxpar.cli.files import Start
    from fxpar.passes.choose_halves import Weighed
    from fxpar.plan.plan import Plan


def explain_halves(ui: Ui, start: Start) -> Report:
    """What halves would save or cost, and what is chosen; where they cannot be, why."""
    from fxpar.cli.files import run_passes
    from fxpar.passes import DEFAULT_PASSES
    from fxpar.passes.choose_halves import weigh_halves

    program, plan = start.program, start.program.plan
    if Property.MASKS not in program.properties:
        program, _ = run_passes(ui, start, DEFAULT_PASSES, until="fold_masks")
    with ui.working(f"compiling {start.name} whole and in halves"):
        found = weigh_halves(program)
    chosen, because = _chosen(plan, found)
    document = {
        "chosen": chosen,
        "because": because,
        "refused": found.reason or None,
        "saved_ms": None if found.halves is None else 1e3 * found.saved,
        **{
            f"{name}_ms": None if own is None else {part: 1e3 * seconds for part, seconds in own.to_json().items()}
            for name, own in (("whole", found.whole), ("halves", found.halves))
        },
    }
    return Report(document, lambda stdout: _show(stdout, found, chosen, because))


def _chosen(plan: Plan, found: Weighed) -> tuple[str, str]:
    """Whether the batch is whole or in halves, and the reason."""
    asked = plan.interleave_halves
    if found.reason:
        return ("refused" if asked is True and found.is_refused else "whole"), found.reason
    if asked is True:
        return "halves", "plan: interleave_halves = True"
    if asked is False:
        return "whole", "plan: interleave_halves = False"
    return ("halves", "predicted to take less time") if found.saved > 0 else ("whole", "halves take no less time")


def _show(stdout: Console, found: Weighed, chosen: str, because: str) -> None:
    rows = table("what", "is")
    rows.add_row("chosen", chosen)
    rows.add_row("because", because)
    for name, own in (("whole", found.whole), ("in halves", found.halves)):
        if own is not None:
            parts = f"products {time_text(own.products)}, exposed {time_text(own.exposed)}"
            rows.add_row(name, f"{time_text(own.total)}: {parts}, kernels around {time_text(own.kernels)}")
    if found.halves is not None:
        rows.add_row("halves", f"{'save' if found.saved > 0 else 'cost'} {time_text(abs(found.saved))} a microbatch")
    print_table(stdout, "half batches in turn", rows)
