"""Rules of complex numbers and their parts.

A sum of complex summands is the sum of their parts, so what is linear over the real numbers keeps partial values.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpar.signatures.op_call import OpCall
from fxpar.signatures.pointwise import pointwise_labels
from fxpar.signatures.rule import Labelling, Labels, Rule

_SELF = (("self",),)
_POINTWISE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "angle": (),
    "_conj": _SELF,
    "_conj_physical": _SELF,
    "conj_physical": _SELF,
    "resolve_conj": _SELF,
    "resolve_neg": _SELF,
    "real": _SELF,
    "imag": _SELF,
    "complex": (("real", "imag"),),
    "polar": (),  # PyTorch's gradient divides by a positive `abs`: summands may be negative
}
# Products of a table that is padded are differentiated by these.
_PADDED: Mapping[str, tuple[str, ...]] = dict.fromkeys(("_conj", "_conj_physical", "resolve_conj"), ("self",))


def _numbered(rank: int) -> Labels:
    return tuple(f"d{i}" for i in range(rank))


def _with_parts(call: OpCall) -> Labelling:
    """`d… -> d… 2`."""
    labels = _numbered(len(call.operands[0].shape))
    return Labelling((labels,), ((*labels, None),))


def _of_parts(call: OpCall) -> Labelling:
    """`d… 2 -> d…`."""
    labels = _numbered(len(call.outputs[0].shape))
    return Labelling(((*labels, None),), (labels,))


def complex_rules() -> dict[str, Rule]:
    """Rules by `aten` overload name."""
    return {
        **{
            f"aten.{name}.default": Rule(pointwise_labels, p, padding=_PADDED.get(name, ()))
            for name, p in _POINTWISE.items()
        },
        "aten.view_as_real.default": Rule(_with_parts, _SELF),
        "aten.view_as_complex.default": Rule(_of_parts, _SELF),
    }
