"""Every error that a user can cause says what to do, wherever in the code it is made."""

from __future__ import annotations

import ast
from pathlib import Path

import fxpar
from fxpar.errors import FxparError, InputError


def remedies_missing(file: Path, classes: set[str]) -> list[str]:
    """Places in a file where one of the errors is made without a remedy."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in classes]
    return [f"{file.name}:{c.lineno}" for c in made if "remedy" not in {keyword.arg for keyword in c.keywords}]


def subclasses(cls: type[FxparError]) -> set[str]:
    """Names of the class and of all below it."""
    return {cls.__name__}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_error_that_a_user_can_cause_is_raised_with_a_remedy() -> None:
    root = Path(fxpar.__file__).parent
    files = {*root.rglob("*.py"), *(root / "passes").glob("*.py")}
    assert len(files) > 50
    classes = subclasses(InputError)
    assert {"InputError", "PlanError", "CaptureError"} <= classes
    assert [place for file in sorted(files) for place in remedies_missing(file, classes)] == []
