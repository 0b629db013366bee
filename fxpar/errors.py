"""The errors fxpar raises: each names a place, gives a reason and a remedy.

Enters: what is wrong. Leaves: one exception whose text a user can act on.
The command line turns `InputError` into exit status 2 and `CheckFailed` into 1, without a traceback.
"""

from __future__ import annotations

from typing import Any

_LONGEST_PLACE, _LONGEST_VALUE, _LONGEST_REASON = 300, 80, 2000


class FxparError(Exception):
    """Is the base of all errors that fxpar raises.

    Example:
        ```python
        try:
            fxpar.Plan(tp=0)
        except fxpar.FxparError as error:
            print(error.where, error.reason, error.remedy)
        ```

    Args:
        reason: what is wrong, as one sentence without a final stop.
        where: the node, parameter, option or file that it is about.
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
    """Returns the text, without its middle if it is longer than anybody reads, such as a whole file as an option."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … ({len(text)} characters) … {text[-most // 4 :]}"


def shown(value: Any) -> str:
    """Returns the text of a caller's value for an error: its repr, or the bits of an int that Python cannot print."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return shorter(repr(value), _LONGEST_VALUE)


class InputError(FxparError):
    """Says that an input of the caller cannot be used: a plan, a model, a file or an option."""


class PlanError(InputError):
    """Says that a plan contradicts itself, the model or the number of processes."""


class RankError(InputError):
    """Says that this rank cannot continue because another one failed, ended or makes different calls."""


class CaptureError(InputError):
    """Says that a model cannot be captured as one graph that computes the same values and gradients."""


class LayoutError(FxparError):
    """Says that a value has a layout that an operation does not accept."""

    advice = "correct the pass or the text that gave it this layout"


class TextError(InputError):
    """Says that a program's text cannot be parsed."""


class ScheduleError(InputError):
    """Says why a schedule cannot run: an unknown word, a missing or misplaced action, or ranks that wait forever."""


class CheckpointError(InputError):
    """Says that a state dict or file cannot be used, lacks a key, has an unknown one or a tensor of another shape."""


class PassError(FxparError):
    """Says that a pass broke its contract."""

    advice = "correct the pass"


class CheckFailed(FxparError):
    """Says that a static or numerical check of a program failed."""

    advice = "correct the pass or the text that made it so; `fxpar bisect` names the pass"
