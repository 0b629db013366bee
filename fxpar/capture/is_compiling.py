"""What the author's code asks torch about itself: whether it is compiled or exported, whether a tensor has values.

Enters: a trace. Leaves: whether such a question was put, and the answer of an eager run where that is wanted. Some
models compute something else in a compiled run, or leave out what they need (a mask of ones, say) and cannot be traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from fxpar.capture import patches
from fxpar.capture.known import known
from fxpar.capture.places import is_foreign_file

_GENERATED = "<eval_with_key>"


class Questions(contextlib.ExitStack):
    """While active, notes questions of the author's code; torch's own get torch's own answers.

    Attributes:
        asked: whether there was one.

    Args:
        as_eager: the answer is no.
    """

    def __init__(self, as_eager: bool) -> None:
        super().__init__()
        self.asked, self._as_eager = False, as_eager

    def __enter__(self) -> Questions:
        super().__enter__()
        self.enter_context(patches.questions(self._answering))
        self.enter_context(patches.question_of_fakes(self._is_fake))
        return self

    def _is_fake(self, value: Any, is_fake: bool) -> bool:
        """What depends on sizes alone is known: a branch on it is the eager one."""
        if is_fake and self._as_eager and _asks(2) and known(value) is not None:
            self.asked = True
            return False
        return is_fake

    def _answering(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def answer() -> Any:
            if not _asks(2):
                return original()
            self.asked = True
            return not self._as_eager and original()

        return answer


def _asks(depth: int) -> bool:
    """Whether the author's code stands so many frames above the caller; generated code has torch's own questions."""
    file = sys._getframe(depth + 1).f_code.co_filename
    return is_foreign_file(file) and not file.startswith(_GENERATED)
