"""Rules as data: what an operation does to layouts on one mesh axis.

Enters: nothing. Leaves: `Rule`, and what one answers, a `Signature` or a `Refusal`; `fxpar.signatures.engine` asks it.

Most rules are *labels*, one for each dimension (`... k, o k -> ... o`): a shard of a label makes every operand that has
the label a shard, leaves the others replicated, and yields a shard, or a partial value where the label is summed. `_`
marks dimensions that cannot be sharded. `partial` lists the operands in which the operation is linear, jointly (`add`:
both at once) or each by itself (`mul`: one of them); `bias?` belongs to its group where it is passed, `tensors*` stands
for each item of a list by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxpar.layout.layout import Placement
from fxpar.signatures.op_call import OpCall


@dataclass(frozen=True)
class Refusal:
    """Why an operation does not accept a layout.

    `structural`: the cut does not fit the shapes (a view tears it, n does not divide it), as opposed to an operation
    that needs the whole dimension (softmax, norm).
    """

    reason: str
    structural: bool = False


@dataclass(frozen=True)
class Signature:
    """Placements of all operands and outputs of an operation on one axis."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


Labels = tuple[str | None, ...]


@dataclass(frozen=True)
class Labelling:
    """A label for each dimension of each operand and output (None: cannot be sharded); `summed` yield partials."""

    operands: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    summed: frozenset[str] = frozenset()


Seed = Callable[[OpCall, int, Placement], Signature | Refusal]
Check = Callable[[OpCall, Sequence[Placement]], tuple[Placement, ...] | Refusal | None]


@dataclass(frozen=True)
class Rule:
    """The legal signatures of an operation.

    Attributes:
        labels: the labelling of a call, or the reason why it has none.
        partial: groups of operand names that may be partial together, the others being replicated.
        seed: for operations that labels cannot describe (views): the signature that one operand's shard asks for.
        check: for operations with further conditions: outputs for given operands; None leaves it to the rest.
        varying: names of operands that may be V (axis indices).
        padding: names of operands whose cut may be padded: padding stays finite there, and its gradient stays zero.
        zeros: whether the results are zero, padding included.
        summands: names of gradients, of which ranks that share blocks must hold summands.
    """

    labels: Callable[[OpCall], Labelling | Refusal] | None = None
    partial: tuple[tuple[str, ...], ...] = ()
    seed: Seed | None = None
    check: Check | None = None
    varying: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()
    zeros: bool = False
    summands: tuple[str, ...] = ()
