"""Options that commands share.

Enters: the functions that are commands, and what a user typed. Leaves: typer commands whose bodies get a `Ui` and,
where they ask for one, a `Request`: the model, the plan and the sizes of the example. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fxpar.cli.output import Report, Ui, console, error_document, error_text, print_error, print_json, status_of
from fxpar.errors import FxparError, InputError, shown
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
        given = [name for name in self.flags if name in names]
        if given:
            raise InputError(f"{', '.join(given)}: {reason}", where=self.model, remedy=remedy)


PLAN_FLAGS = (
    "--plan",
    "--tp",
    "--dp",
    "--pp",
    "--ep",
    "--etp",
    "--dispatch",
    "--grouped-gemm",
    "--receive-budget",
    "--virtual-stages",
    "--stage",
    "--split",
    "--row-wise",
    "--added-loss",
    "--experts",
    "--batch-dim",
    "--loss-reduction",
    "--cast-inputs",
    "--batch-norm",
    "--sequence-parallel",
    "--interleave-halves",
    "--seed",
    "--precision",
    "--recompute",
    "--activation-budget",
)
EXAMPLE_FLAGS = ("--batch", "--seq")
MODE_FLAG = "--train/--eval"

# More digits than any size, rank or seed has; Python's own limit is thousands.
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[0-9]{0,20}\.[0-9]{1,20}")


def whole_number(text: str | int) -> int:
    """The number that a word of the command line is; typer passes defaults through here too.

    Raises:
        BadParameter: it is none in plain digits, or has more digits than any number asked for.
    """
    if isinstance(text, int):
        return text
    if not _NUMBER.fullmatch(text):
        raise typer.BadParameter(f"{shown(text)} is no whole number of at most 20 digits")
    return int(text)


def budget(text: str | int | float) -> int | float:
    """The number that a budget is; what numbers mean the plan knows.

    Raises:
        BadParameter: it is no number.
    """
    if isinstance(text, (int, float)):
        return text
    if _NUMBER.fullmatch(text):
        return int(text)
    if not _DECIMAL.fullmatch(text):
        raise typer.BadParameter(f"{shown(text)} is no number")
    return float(text)


def _switch(text: str | bool) -> bool | str:
    """The value of an option that may be left open; which words it knows the plan says.

    Typer passes defaults through here too.
    """
    return {"true": True, "false": False}.get(text, text) if isinstance(text, str) else text


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
    tp: Annotated[int | None, number_option("ranks that split each layer")] = None,
    dp: Annotated[int | None, number_option("groups of them that share out the batch")] = None,
    pp: Annotated[int | None, number_option("ranks that share out the layers, stages of a pipeline")] = None,
    ep: Annotated[int | None, number_option("ranks that hold different experts, among those of tp and dp")] = None,
    etp: Annotated[int | None, number_option("ranks that split each expert, 1 or tp (default: tp)")] = None,
    dispatch: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="how tokens come to their experts, static, allgather, alltoall or exact: see fxpar.Plan"
        ),
    ] = None,
    grouped_gemm: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="what multiplies rows with experts' matrices, torch or transformer_engine: see fxpar.Plan",
        ),
    ] = None,
    receive_budget: Annotated[
        float | None,
        typer.Option(metavar="N", parser=budget, help="places for rows of experts, as a multiple of a balanced load"),
    ] = None,
    capacity_factor: Annotated[
        float | None,
        typer.Option(metavar="N", parser=budget, help="rows that an expert takes, as a multiple of a balanced load"),
    ] = None,
    drop_policy: Annotated[
        str | None, typer.Option(metavar="HOW", help="which rows it takes, by probs or by position: see fxpar.Plan")
    ] = None,
    padded: Annotated[
        bool | None,
        typer.Option(
            "--pad-to-capacity/--no-pad-to-capacity", help="compute as many rows of each expert as it may take"
        ),
    ] = None,
    virtual_stages: Annotated[int | None, number_option("stages of the pipeline on each of its ranks")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE=N", help="the module with which stage N of the pipeline begins; repeatable"),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=HOW",
            help="split the modules or parameters that GLOB names by column, row, head, vocab or replicate; repeatable",
        ),
    ] = None,
    row_wise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="operators without a rule that compute the rows of the batch apart, by name; repeatable",
        ),
    ] = None,
    added_loss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="autograd functions that pass a value and add the gradient of a scalar loss, by name; repeatable",
        ),
    ] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="modules of experts whose loop over them is computed as routed rows, by name; repeatable",
        ),
    ] = None,
    batch_dim: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=DIM", help="dimension of an input that is the batch, if not the first; repeatable"),
    ] = None,
    loss_reduction: Annotated[
        str | None, typer.Option(metavar="HOW", help="mean, token, local_mean or sum: see fxpar.Plan")
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(metavar="HOW", help="over data ranks: refuse or global: see fxpar.Plan")
    ] = None,
    sequence: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="cut activations between the split matrices over the sequence (default: no)",
        ),
    ] = None,
    interleave_halves: Annotated[
        str | None,
        typer.Option(
            metavar="true|false|auto",
            parser=_switch,
            help="compute the two halves of a rank's batch in turn, each beside the other's collectives, or where that "
            "is predicted to take less time (default: false)",
        ),
    ] = None,
    seed: Annotated[int | None, number_option("seed of dropout, random weights and the example")] = None,
    precision: Annotated[str | None, typer.Option(metavar="TYPE", help="as_is, fp32, bf16, …: see fxpar.Plan")] = None,
    cast_inputs: Annotated[
        bool | None,
        typer.Option(
            "--cast-inputs/--no-cast-inputs",
            help="cast floating tensors that forward takes to the precision's type (default: yes)",
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="what the backward computes again: none, selective or full: see fxpar.Plan"),
    ] = None,
    activation_budget: Annotated[
        float | None,
        typer.Option(
            metavar="N", parser=budget, help="with selective: bytes kept for the backward, or a part (0.5) of all"
        ),
    ] = None,
    train: Annotated[bool | None, typer.Option("--train/--eval", help="mode to capture (default: train)")] = None,
    batch: Annotated[int | None, number_option("samples of an hf: example, for each data rank (default: 3)")] = None,
    seq: Annotated[int | None, number_option("tokens a sample of an hf: example (default: 16)")] = None,
) -> Request:
    """The request of a command line.

    Raises:
        InputError: the plan file or a flag cannot be used.
    """
    given: dict[str, Any] = {"--plan": plan}
    given |= {"--pp": pp, "--virtual-stages": virtual_stages, "--stage": stage, "--ep": ep, "--etp": etp}
    given |= {"--dispatch": dispatch, "--grouped-gemm": grouped_gemm, "--receive-budget": receive_budget}
    given |= {"--capacity-factor": capacity_factor, "--drop-policy": drop_policy, "--pad-to-capacity": padded}
    given |= {"--tp": tp, "--dp": dp, "--split": split, "--seed": seed, "--precision": precision}
    given |= {
        "--cast-inputs": cast_inputs,
        "--sequence-parallel": sequence,
        "--row-wise": row_wise,
        "--added-loss": added_loss,
        "--batch-dim": batch_dim,
    }
    given |= {"--interleave-halves": interleave_halves, "--experts": experts}
    given |= {"--loss-reduction": loss_reduction, "--recompute": recompute, "--activation-budget": activation_budget}
    given |= {"--batch-norm": batch_norm}
    given |= {MODE_FLAG: train, "--batch": batch, "--seq": seq}
    chosen = Plan() if plan is None else Plan.load(plan)
    changes: dict[str, Any] = {"tp": tp, "dp": dp, "sequence_parallel": sequence, "seed": seed, "precision": precision}
    changes |= {
        "cast_inputs": cast_inputs,
        "loss_reduction": loss_reduction,
        "recompute": recompute,
        "activation_budget": activation_budget,
    }
    changes |= {"pp": pp, "virtual_stages": virtual_stages, "ep": ep, "etp": etp, "dispatch": dispatch}
    changes |= {
        "grouped_gemm": grouped_gemm,
        "receive_budget": receive_budget,
        "capacity_factor": capacity_factor,
        "interleave_halves": interleave_halves,
    }
    changes |= {"batch_norm": batch_norm, "drop_policy": drop_policy, "pad_to_capacity": padded}
    changes = {name: value for name, value in changes.items() if value is not None}
    if split:
        changes["split"] = {**chosen.split, **_split_lines(split)}
    if batch_dim:
        changes["batch_dims"] = {**chosen.batch_dims, **_dims(batch_dim)}
    if stage:
        changes["stages"] = _stages(stage)
    if row_wise:
        changes["row_wise"] = (*chosen.row_wise, *row_wise)
    if added_loss:
        changes["added_losses"] = (*chosen.added_losses, *added_loss)
    if experts:
        changes["experts"] = (*chosen.experts, *experts)
    flags = tuple(name for name, value in given.items() if value not in (None, []))
    return Request(model, chosen.replace(**changes), flags, batch, seq, train is not False)


def _split_lines(lines: Sequence[str]) -> dict[str, str]:
    return _pairs("--split", lines, "is no line of a split", "GLOB=HOW")


def _dims(lines: Sequence[str]) -> dict[str, int]:
    found = _pairs("--batch-dim", lines, "is no dimension of an input", "PATH=DIM")
    for path, dim in found.items():
        if not re.fullmatch(r"-?\d{1,3}", dim):
            where = f"--batch-dim {path}={dim}"
            raise InputError("is no dimension of an input", where=where, remedy="write 'PATH=DIM', a number")
    return {path: int(dim) for path, dim in found.items()}


def _stages(lines: Sequence[str]) -> dict[str, int]:
    found = _pairs("--stage", lines, "is no beginning of a stage", "MODULE=N")
    for name, number in found.items():
        if not re.fullmatch(r"\d{1,4}", number):
            where = f"--stage {name}={number}"
            raise InputError("is no number of a stage", where=where, remedy="write 'MODULE=N'")
    return {name: int(number) for name, number in found.items()}


def _pairs(flag: str, lines: Sequence[str], reason: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.rpartition("=")
        if not equals or not name:
            raise InputError(reason, where=f"{flag} {line}", remedy=f"write '{form}'")
        if found.setdefault(name, value) != value:
            raise InputError(f"contradicts {flag} {name}={found[name]}", where=f"{flag} {line}", remedy="keep one")
    return found


Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Passes = Annotated[
    str | None,
    typer.Option(metavar="MODULE:ATTR", help="run this list of passes (or FILE.py:ATTR) instead of the default ones"),
]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Decorator that makes a function a command.

    The function takes a `Ui` and, if its second parameter is a `Request`, the options of `_request`; further
    parameters are options of its own. The command has `--json` too, prints the report and turns errors of fxpar into
    one paragraph and an exit status.
    """

    def register(body: Callable[..., Report]) -> Callable[..., Report]:
        hints = typing.get_type_hints(body, include_extras=True)
        own = list(inspect.signature(body).parameters.values())[1:]
        wants_request = bool(own) and hints[own[0].name] is Request
        shared = _parameters(_request) if wants_request else []
        own = [p.replace(annotation=hints[p.name]) for p in own[wants_request:]]
        flag = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*shared, *own]]

        @functools.wraps(body)
        def run(*, json: bool, **given: Any) -> None:
            def work(ui: Ui) -> Report:
                if not wants_request:
                    return body(ui, **given)
                request = _request(**{p.name: given.pop(p.name) for p in shared})
                return body(ui, request, **given)

            _run(work, Ui(json))

        signature = inspect.Signature([*parameters, flag])
        vars(run)["__signature__"] = signature
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        app.command(name)(run)
        return body

    return register


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    return [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]


def _run(work: Callable[[Ui], Report], ui: Ui) -> None:
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
