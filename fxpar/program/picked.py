"""The refusal of a loop over experts that picks as many rows as the routing sends.

Enters: where it stands. Leaves: an error with its remedies.
"""

from __future__ import annotations

from fxpar.errors import CaptureError


def loop_of_experts(where: str, path: str) -> CaptureError:
    """Refuses a loop over experts.

    Args:
        where: the author's line.
        path: of the module that has it; empty where that is the model.
    """
    named = f"name it: Plan(experts=({path!r},))" if path else "make it a module and name that in Plan(experts=…)"
    return CaptureError(
        "its rows are picked expert by expert, as many as the routing sends to each, which no program can hold",
        where=f"{where} ({path})" if path else where,
        remedy="call fxpar.ops.experts in it; or where the forward is (hidden_states, top_k_index, top_k_weights) "
        f"{named}",
    )
