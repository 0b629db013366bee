"""The errors fxpar raises: each names a place, gives a reason and a remedy.

Enters: what is wrong. Leaves: one exception whose text a user can act on.
The command line turns `InputError` into exit status 2 and `CheckFailed` into 1, without a traceback.
"""

from __future__ import annotations

from typing import Any

_LONGEST_PLACE, _LONGEST_VALUE, _LONGEST_REASON = 300, 80, 2000


class FxparError(Exception):
    """Base of every error of fxpar.

    Args:
        reason: what is wrong, as one sentence without a final stop.
        where: the node, parameter, option or file it is about.
        remedy: what to do about it; the class's `advice` by default.
    """

    advice = ""

    def __init__(self, reason: str, *, where: str = "", remedy: str = "") -> None:
        where, reason, remedy = shorter(where, _LONGEST_PLACE), shorter(reason), shorter(remedy or self.advice)
        self.reason, self.where, self.remedy = reason, where, remedy
        place = f"{where}: " if where else ""
        advice = f"; {remedy}" if remedy else ""
        super().__init__(f"{place}{reason}{advice}")


def shorter(text: str, most: int = _LONGEST_REASON) -> str:
    """The text, its middle left out where it is longer than anybody reads: a file as an option's value, say."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … ({len(text)} characters) … {text[-most // 4 :]}"


def shown(value: Any) -> str:
    """A value of the caller's in an error: its repr, or how large it is; Python prints no int of many digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return shorter(repr(value), _LONGEST_VALUE)


class InputError(FxparError):
    """The caller's input cannot be used: a plan, a model, a file or an option."""


class PlanError(InputError):
    """A plan contradicts itself, the model or the world it runs in."""


class RankError(InputError):
    """Another rank is why this one cannot go on: it failed, has ended, or makes other calls."""


class CaptureError(InputError):
    """A model cannot be captured into one graph that computes the same values and gradients."""


class LayoutError(FxparError):
    """A value has a layout that an operation does not accept."""

    advice = "correct the pass or the text that gave it this layout"


class TextError(InputError):
    """A program's text cannot be parsed."""


class ScheduleError(InputError):
    """A pipeline schedule cannot run: a word is unknown, an action is missing or misplaced, or ranks wait forever."""


class CheckpointError(InputError):
    """A state dict lacks a key, has one too many or a tensor of another shape."""


class PassError(FxparError):
    """A pass broke its contract."""

    advice = "correct the pass"


class CheckFailed(FxparError):
    """A static or numerical check of a program failed."""

    advice = "correct the pass or the text that made it so; `fxpar bisect` names the pass"


# The refusal of a loop over experts that picks as many rows as the routing sends.


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
