"""Options that commands share.

Enters: the functions that are commands, and what a user typed. Leaves: typer commands whose bodies get a `Ui` and,
where they ask for one, a `Request`: the model, the plan and the sizes of the example. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fxpar.cli.output import CommandResult, Ui, console, error_document, error_text, print_error, print_json, status_of
from fxpar.cli.plan_flags import changed_plan, given, plan_flags, whole_number
from fxpar.errors import FxparError, InputError
from fxpar.plan.plan import Plan


@dataclass(frozen=True)
class Request:
    """What the words MODEL and the options next to it ask for.

    Attributes:
        model: `hf:TYPE[,key=value…]`, `module:function`, `file.py:function` or the file of a program's text.
        plan: from `--plan`, changed by flags.
        flags: the options about plan, mode and sizes that were given; a text has its own plan, mode and sizes.
        batch: size of the example, None for the default.
        seq: sequence length of the example, None for the default.
        train: whether to capture training mode.
    """

    model: str
    plan: Plan
    flags: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    train: bool = True

    def refuse(self, names: Sequence[str], reason: str, remedy: str) -> None:
        """Refuses options that say nothing of this model.

        Raises:
            InputError: one of `names` was given.
        """
        useless = [name for name in self.flags if name in names]
        if useless:
            raise InputError(f"{', '.join(useless)}: {reason}", where=self.model, remedy=remedy)


# Flags that a program's text fixes: those of the plan, of the mode and of the example.
PLAN_FLAGS = ("--plan", *(flag.name for flag in plan_flags()))
EXAMPLE_FLAGS = ("--batch", "--seq")
MODE_FLAG = "--train/--eval"


def number_option(text: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(metavar="N", parser=whole_number, help=text)


def _request(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="hf:TYPE[,key=value…] (a small random transformers model), module:function or file.py:function "
            "returning (model, batch) or (model, batch, loss), or the file of a program's text",
        ),
    ],
    plan: Annotated[str | None, typer.Option(metavar="FILE", help="plan as YAML; flags win over it")] = None,
    train: Annotated[bool | None, typer.Option("--train/--eval", help="mode to capture (default: train)")] = None,
    batch: Annotated[int | None, number_option("samples of an hf: example, for each data rank (default: 3)")] = None,
    seq: Annotated[int | None, number_option("tokens a sample of an hf: example (default: 16)")] = None,
    **options: Any,
) -> Request:
    """Returns the request of a command line.

    Args:
        options: those of the plan, by field.

    Raises:
        InputError: the plan file or a flag cannot be used.
    """
    values = {"--plan": plan, MODE_FLAG: train, "--batch": batch, "--seq": seq}
    values |= {flag.name: options[flag.field] for flag in plan_flags()}
    changed = changed_plan(Plan() if plan is None else Plan.load(plan), options)
    return Request(model, changed, tuple(n for n, v in values.items() if given(v)), batch, seq, train is not False)


def _shared_parameters() -> list[inspect.Parameter]:
    """Returns the parameters of commands that take a `Request`: its own, and the plan's flags."""
    hints = typing.get_type_hints(_request, include_extras=True)
    model, plan, *rest, _ = inspect.signature(_request).parameters.values()
    named = [p.replace(annotation=hints[p.name]) for p in (model, plan, *rest)]
    return [*named[:2], *(flag.parameter for flag in plan_flags()), *named[2:]]


Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Passes = Annotated[
    str | None,
    typer.Option(metavar="MODULE:ATTR", help="run this list of passes (or FILE.py:ATTR) instead of the default ones"),
]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Decorator that makes a function a command.

    The function takes a `Ui` and, if its second parameter is a `Request`, the options of `_request`; further
    parameters are options of its own. The command has `--json` too, prints the report and turns errors of fxpar into
    one paragraph and an exit status.
    """

    def register(body: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
        hints = typing.get_type_hints(body, include_extras=True)
        declared = list(inspect.signature(body).parameters.values())[1:]
        wants_request = bool(declared) and hints[declared[0].name] is Request
        shared = _shared_parameters() if wants_request else []
        declared = [p.replace(annotation=hints[p.name]) for p in declared[wants_request:]]
        flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*shared, *declared]]

        @functools.wraps(body)
        def run(*, json: bool, **values: Any) -> None:
            def work(ui: Ui) -> CommandResult:
                if not wants_request:
                    return body(ui, **values)
                request = _request(**{p.name: values.pop(p.name) for p in shared})
                return body(ui, request, **values)

            _run(work, Ui(json))

        signature = inspect.Signature([*parameters, flag])
        vars(run)["__signature__"] = signature
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        app.command(name)(run)
        return body

    return register


def _run(work: Callable[[Ui], CommandResult], ui: Ui) -> None:
    """Does the work, prints what came out and exits with its status."""
    stdout = sys.stdout
    try:
        # What a user's model prints must not stand in the JSON document.
        with contextlib.redirect_stdout(sys.stderr) if ui.json else contextlib.nullcontext():
            report = work(ui)
    except FxparError as error:
        if ui.json:
            print_json({"ok": False, "error": error_document(error)}, stdout)
        print_error(error_text(error))
        raise typer.Exit(status_of(error)) from None
    if ui.json:
        print_json(report.document, stdout)
    else:
        report.show(console(stdout))
    if report.error is not None:
        print_error(error_text(report.error))
    if report.status:
        raise typer.Exit(report.status)
