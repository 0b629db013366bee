"""Rules of the operators that order rows between ranks (`fxpar.ops.blocks`): each leading dimension by itself."""

from __future__ import annotations

from fxpar.signatures.matmul import formula
from fxpar.signatures.rule import Rule


def dispatch_rules() -> dict[str, Rule]:
    """Rules by overload name."""
    return {
        "fxpar.block_order.default": Rule(formula("... _, ... _ -> ... _", "order", "counts")),
        "fxpar.received_order.default": Rule(formula("... _ _ -> ... _, ... _", "counts")),
        "fxpar.resize_rows.default": Rule(formula("... _ h -> ... _ h", "x"), (("x",),)),
    }
