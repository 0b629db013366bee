"""Places in the author's code: source lines of nodes and errors, module paths of nodes.

Enters: nodes of a trace, exceptions. Leaves: `file.py:41` and `layers.0.mlp`. Frames of torch, sympy and fxpar are not
the author's, nor are those of the standard library.
"""

from __future__ import annotations

import contextlib
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import sympy
import torch
from torch import fx

from fxpar.errors import FxparError

_FOREIGN = (
    f"{Path(__file__).parents[1]}/",
    *(f"{Path(str(package.__file__)).parent}/" for package in (torch, sympy)),  # sizes are sympy's
)
# What authors call, and write no models in: what an error or a node is blamed on is the line that called it.
_CALLED = re.compile(r"-packages/(?:torch|sympy|numpy|einops|opt_einsum|jaxtyping|beartype)/")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def is_own(file: str) -> bool:
    """Returns whether a file may be the author's."""
    # Frames that torch makes up have a relative path.
    standard = file.startswith(_STANDARD_LIBRARY) and "-packages/" not in file
    return file.startswith("/") and not standard and not file.startswith(_FOREIGN)


def is_foreign_file(file: str) -> bool:
    """Returns whether a file is neither of torch, of fxpar nor of the standard library, be it a notebook's cell."""
    standard = file.startswith((_STANDARD_LIBRARY, "<frozen ")) and "-packages/" not in file
    return not standard and not file.startswith(_FOREIGN)


def _is_blamed(file: str) -> bool:
    """Returns whether a line of a file is one to name."""
    return is_own(file) and _CALLED.search(file) is None


def source_of(node: fx.Node) -> str:
    """Returns the innermost line of the author's own code that made the node; empty where none did."""
    frames = [(file, line) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "") if _is_blamed(file)]
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{Path(file).name}:{line}"


def place_of(error: BaseException) -> str:
    """Returns the deepest line of the author's own code in an error's traceback; empty where there is none."""
    place, entry = "", error.__traceback__
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if _is_blamed(file):
            place = f"{Path(file).name}:{entry.tb_lineno}"
        entry = entry.tb_next
    return place


class Blamed(contextlib.AbstractContextManager[None]):
    """Turns what the author's code raises, of whatever type, into one error that names its line.

    Args:
        error: makes the error of reason and place.
    """

    def __init__(self, error: Callable[[str, str], FxparError]) -> None:
        self._error = error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Reports errors with their places; those of fxpar and interrupts stay what they are."""
        if isinstance(error, Exception) and not isinstance(error, FxparError):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            shown = f": {lines[0][:300]}" if lines else ""
            raise self._error(f"{type(error).__name__}{shown}", place_of(error)) from error


def module_of(node: fx.Node) -> str:
    """Returns the path of the module whose forward made the node; empty for the root.

    Dynamo writes paths as expressions (`L['self'].layers[0]`), export as names (`layers.0`).
    """
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if not str(entry[0]).startswith("_empty_nn")]
    if not paths:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", paths[-1])
    return _INDEX.sub(r".\1", path.replace("._modules", "")).lstrip(".")
