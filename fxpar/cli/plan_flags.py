"""Flags of the plan's options, made from the fields of `Plan` and of its records.

A flag is a field's name with dashes; `--recompute` is the mode of its record. A flag's help is the first sentence of
what the class says of the field, and the field's type says how its words become a value: mappings and lists take a flag
for each entry. Needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import yaml

from fxpar.cli.output import CommandResult, Ui, console, error_document, error_text, print_error, print_json, status_of
from fxpar.errors import FxparError, InputError, shown
from fxpar.mesh.axes import PURPOSES
from fxpar.plan.cost import Cost
from fxpar.plan.plan import CHOICES, GROUPS, Plan
from fxpar.plan.plan_options import CHOICES as GROUP_CHOICES
from fxpar.plan.plan_options import CudaGraphs, check_known

# More digits than any size, rank or seed has; Python's own limit is thousands.
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[0-9]{0,20}\.[0-9]{1,20}")


# Records whose options stand after one flag, as `--cost bandwidth=3e11`: by themselves their names say nothing.
_BY_PAIRS = (CudaGraphs, Cost)


# Where the help lists flags.
_RANKS, _PLAN, _MODEL = "Ranks", "Plan", "Model and example"


@dataclass(frozen=True)
class Flag:
    """A plan's option on the command line.

    Attributes:
        record: the record of `Plan` that has the option; empty where `Plan` has it.
        field: the option's name there.
        name: `--capacity-factor`.
        annotation: what typer makes of it.
        change: the option's value, from the plan or record as it is and what was given with the flag.
    """

    record: str
    field: str
    name: str
    annotation: Any
    change: Callable[[Any, Any], Any]

    @property
    def key(self) -> str:
        """Returns the name of the flag as a parameter of a command."""
        return self.name[2:].replace("-", "_")

    @property
    def parameter(self) -> inspect.Parameter:
        """Returns the flag as a parameter of a command; None is its default."""
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=self.annotation)


def changed_plan(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """Returns the plan with the options that were given as flags.

    Args:
        plan: the one that flags change.
        values: by parameter what typer read; None or an empty list where the flag was not given.

    Raises:
        InputError: an entry of a flag has another form.
        PlanError: the plan refuses a value.
    """
    changes: dict[str, Any] = {}
    for flag in plan_flags():
        if is_given(values[flag.key]):
            owner = getattr(plan, flag.record) if flag.record else plan
            changes.setdefault(flag.record, {})[flag.field] = flag.change(owner, values[flag.key])
    flat = changes.pop("", {})
    records = {name: dataclasses.replace(getattr(plan, name), **options) for name, options in changes.items()}
    return plan.replace(**flat, **records)


def is_given(value: Any) -> bool:
    """Returns whether a flag was given: typer has None or an empty list of one that was not."""
    return value is not None and value != []


@functools.cache
def plan_flags() -> tuple[Flag, ...]:
    """Returns the flags of all options, in the order of the plan's fields."""
    flags: list[Flag] = []
    for field in dataclasses.fields(Plan):
        kind = GROUPS.get(field.name)
        if kind is None or kind in _BY_PAIRS:
            panel = _RANKS if field.name in PURPOSES else _PLAN
            flags.append(_in_panel(panel, _flag("", Plan, field.name)))
        else:
            panel = f"{_PLAN}: {field.name}"
            flags += [_in_panel(panel, _flag(field.name, kind, option.name)) for option in dataclasses.fields(kind)]
    return tuple(flags)


def _in_panel(panel: str, flag: Flag) -> Flag:
    """Returns the flag, which the help lists in this panel."""
    typing.get_args(flag.annotation)[1].rich_help_panel = panel
    return flag


def _flag(record: str, owner: type, field: str) -> Flag:
    """Returns the flag of a field of a class by its type."""
    hint, text = typing.get_type_hints(owner)[field], _first_sentence(_documentation(owner).get(field, ""))
    name = "--" + (record if field == "mode" else field).replace("_", "-")
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [part for part in parts if part is not types.NoneType]
    default = getattr(owner(), field)
    flag = functools.partial(Flag, record, field, name)
    if default not in (None, "") and isinstance(default, (str, int, float)):
        text = f"{text} (default: {_as_word(default)})"
    mapping = next((kind for kind in kinds if typing.get_origin(kind) is not None and _is_mapping(kind)), None)
    if mapping is not None:
        metavar, number_kinds = "NAME=VALUE", _kinds_of(typing.get_args(mapping)[1])
        change = functools.partial(_changed_mapping, field, name, number_kinds, len(kinds) > 1)
        return flag(_repeatable(name, metavar, text), change)
    if dataclasses.is_dataclass(kinds[0]):
        change = functools.partial(_changed_record, field, name)
        return flag(_repeatable(name, "OPTION=VALUE", text), change)
    if typing.get_origin(kinds[0]) is tuple:
        if typing.get_args(kinds[0])[0] is int:
            return flag(_scalar(name, {str}, ("N,N…",), text), lambda _, words: whole_numbers(words, name, "2,2,4"))
        change = functools.partial(_longer_list, field)
        return flag(_repeatable(name, "GLOB", text), change)
    words = (CHOICES if owner is Plan else GROUP_CHOICES).get(field, ())
    return flag(_scalar(name, set(kinds), words, text), lambda _, value: value)


def _is_mapping(kind: Any) -> bool:
    return issubclass(typing.get_origin(kind), Mapping)


def _kinds_of(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) or (hint,)


def _as_word(value: str | int | float) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _repeatable(name: str, metavar: str, text: str) -> Any:
    return Annotated[list[str] | None, typer.Option(name, metavar=metavar, help=f"{text}; repeatable")]


def _scalar(name: str, kinds: set[Any], words: Sequence[str], text: str) -> Any:
    """Returns the annotation of an option that has one value."""
    if kinds == {bool}:
        return Annotated[bool | None, typer.Option(f"{name}/--no-{name[2:]}", help=text)]
    if kinds == {int}:
        return Annotated[int | None, typer.Option(name, metavar="N", parser=whole_number, help=text)]
    if kinds == {int, float}:
        return Annotated[float | None, typer.Option(name, metavar="N", parser=number, help=text)]
    if kinds == {int, str}:
        return Annotated[Any, typer.Option(name, metavar="N|WORD", parser=number_or_word, help=text)]
    assert kinds == {str}, f"{name} has a type that no flag is made of"
    return Annotated[str | None, typer.Option(name, metavar="|".join(words) or "TEXT", help=text)]


# ---------------------------------------------------------------------- values


def whole_number(text: str | int) -> int:
    """Returns the number that a word of the command line is; typer passes defaults through here too.

    Raises:
        BadParameter: it is none in plain digits, or has more digits than any number asked for.
    """
    if isinstance(text, int):
        return text
    if not _NUMBER.fullmatch(text):
        raise typer.BadParameter(f"must be a whole number of at most 20 digits, got {shown(text)}")
    return int(text)


def whole_numbers(text: str, where: str, example: str) -> tuple[int, ...]:
    """Returns the numbers of a list with commas; the error shows the example.

    Raises:
        InputError: a word of it is no whole number.
    """
    try:
        return tuple(whole_number(word) for word in text.split(","))
    except typer.BadParameter as error:
        raise InputError(error.message, where=where, remedy=f"write whole numbers as in {example}") from None


def number_or_word(text: str | int) -> int | str:
    """Returns a word, or the number that it is; which words there are the plan knows."""
    return int(text) if isinstance(text, int) or _NUMBER.fullmatch(text) else text


def number(text: str | int | float) -> int | float:
    """Returns the number that a word is; what numbers mean the plan knows.

    Raises:
        BadParameter: it is no number.
    """
    if isinstance(text, (int, float)):
        return text
    if _NUMBER.fullmatch(text):
        return int(text)
    if not _DECIMAL.fullmatch(text):
        raise typer.BadParameter(f"must be a number, got {shown(text)}")
    return float(text)


def yaml_value(text: str, where: str) -> Any:
    """Returns a value of YAML, in which 1e-5 is a number.

    Raises:
        InputError: it is none.
    """
    try:
        return _with_numbers(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # a number of too many digits, brackets in brackets
        reason, remedy = f"must be a value of YAML, got {shown(text)}", "write a number, a word or [a, list]"
        raise InputError(reason, where=where, remedy=remedy) from None


def _with_numbers(value: Any) -> Any:
    """Returns the value with numbers such as 1e-5, which YAML reads as text."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _longer_list(field: str, owner: Any, lines: Sequence[str]) -> tuple[str, ...]:
    return (*getattr(owner, field), *lines)


def _changed_record(field: str, flag: str, owner: Any, lines: Sequence[str]) -> Any:
    """Returns an option that has options of its own, some of them changed."""
    record = getattr(owner, field)
    values = {key: yaml_value(text, f"{flag} {key}={text}") for key, text in _pairs(flag, lines, is_last=False).items()}
    check_known(values, type(record), flag)
    return dataclasses.replace(record, **values)


def _changed_mapping(
    field: str, flag: str, kinds: tuple[type, ...], is_list_too: bool, owner: Any, lines: Sequence[str]
) -> Any:
    """Returns a mapping with further entries; of an option that may be a list of numbers too, what the flags alone say.

    Args:
        kinds: types of the mapping's values.
        is_list_too: whether numbers without a name are such a list.
    """
    if is_list_too and not any("=" in line for line in lines):
        return tuple(_of_kind(line, kinds, f"{flag} {line}", "NAME=VALUE, or numbers alone") for line in lines)
    pairs = _pairs(flag, lines, is_last=True).items()
    entries = {name: _of_kind(text, kinds, f"{flag} {name}={text}", "NAME=VALUE") for name, text in pairs}
    return entries if is_list_too else {**getattr(owner, field), **entries}


def _of_kind(text: str, kinds: tuple[type, ...], where: str, form: str) -> Any:
    if kinds == (str,):
        return text
    value = int(text) if _NUMBER.fullmatch(text) else yaml_value(text, where)
    if type(value) not in kinds:
        what = "a whole number" if kinds == (int,) else "a number"
        raise InputError(f"must be {what}, got {shown(text)}", where=where, remedy=f"write {form}")
    return value


def _pairs(flag: str, lines: Sequence[str], is_last: bool) -> dict[str, str]:
    """Returns texts by name; `is_last` says at which of several signs a line is cut."""
    pairs: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.rpartition("=") if is_last else line.partition("=")
        if not equals or not name:
            raise InputError("names no value", where=f"{flag} {line}", remedy="write NAME=VALUE")
        if pairs.setdefault(name, value) != value:
            raise InputError(f"contradicts {flag} {name}={pairs[name]}", where=f"{flag} {line}", remedy="keep one")
    return pairs


# ---------------------------------------------------------------------- documentation


def _documentation(owner: type) -> dict[str, str]:
    """Returns what a class says of each of its fields; nothing where Python keeps no docstrings."""
    attributes = (inspect.getdoc(owner) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _first_sentence(text: str) -> str:
    return re.split(r"[.:;](?= |$)", text, maxsplit=1)[0].replace("`", "")


# Options that commands share.


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
        cache: whether a trace that an earlier command left on disk is taken, and one is left.
    """

    model: str
    plan: Plan
    flags: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    train: bool = True
    cache: bool = True

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


def number_option(text: str, panel: str | None = None) -> Any:
    """Returns an option that takes a whole number, which the help lists in a panel."""
    return typer.Option(metavar="N", parser=whole_number, help=text, rich_help_panel=panel)


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
    train: Annotated[
        bool | None, typer.Option("--train/--eval", rich_help_panel=_MODEL, help="mode to capture (default: train)")
    ] = None,
    batch: Annotated[
        int | None, number_option("samples of the example, for each data rank (default: 3 of an hf: model)", _MODEL)
    ] = None,
    seq: Annotated[int | None, number_option("tokens a sample of an hf: example (default: 16)", _MODEL)] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            rich_help_panel=_MODEL,
            help="take an equal trace of an earlier command from disk, or leave one",
        ),
    ] = True,
    **options: Any,
) -> Request:
    """Returns the request of a command line.

    Args:
        options: those of the plan, by parameter.

    Raises:
        InputError: the plan file or a flag cannot be used.
    """
    values = {"--plan": plan, MODE_FLAG: train, "--batch": batch, "--seq": seq}
    values |= {flag.name: options[flag.key] for flag in plan_flags()}
    changed = changed_plan(Plan() if plan is None else Plan.load(plan), options)
    flags = tuple(name for name, value in values.items() if is_given(value))
    return Request(model, changed, flags, batch, seq, train is not False, cache)


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


def command(app: typer.Typer, body: Callable[..., CommandResult], panel: str | None = None) -> None:
    """Makes a function a command of its name, which the help lists in this panel.

    The function takes a `Ui`. For a parameter that is a `Request` the command has the options of `_request`, for
    another record one for each field of that. Further parameters are options as they are. The command has `--json` too,
    prints the report and turns errors of fxpar into one paragraph and an exit status.
    """
    hints = typing.get_type_hints(body, include_extras=True)
    records: dict[str, tuple[list[inspect.Parameter], Callable[..., Any]]] = {}
    declared: list[inspect.Parameter] = []
    for parameter in list(inspect.signature(body).parameters.values())[1:]:
        options, make = _record_options(hints[parameter.name])
        if make is not None:
            records[parameter.name] = options, make
        declared += options or [parameter.replace(annotation=hints[parameter.name])]
    flag = _option("json", False, Json)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in declared]

    @functools.wraps(body)
    def run(*, json: bool, **values: Any) -> None:
        def work(ui: Ui) -> CommandResult:
            for name, (options, make) in records.items():
                values[name] = make(**{option.name: values.pop(option.name) for option in options})
            return body(ui, **values)

        _run(work, Ui(json))

    signature = inspect.Signature([*parameters, flag])
    vars(run)["__signature__"] = signature
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    app.command(body.__name__, rich_help_panel=panel)(run)


def _record_options(kind: Any) -> tuple[list[inspect.Parameter], Callable[..., Any] | None]:
    """Returns the parameters of a command from which a record is made, and what makes it; none for others."""
    if kind is Request:
        return _shared_parameters(), _request
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return [], None
    hints = typing.get_type_hints(kind, include_extras=True)
    if all(typing.get_origin(hint) is Annotated for hint in hints.values()):  # fields that are options themselves
        fields = dataclasses.fields(kind)
        return [_option(field.name, field.default, hints[field.name]) for field in fields], kind
    flags = [_flag("", kind, field.name) for field in dataclasses.fields(kind)]

    def make(**values: Any) -> Any:
        return kind(**{f.field: f.change(None, values[f.key]) for f in flags if is_given(values[f.key])})

    return [flag.parameter for flag in flags], make


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
