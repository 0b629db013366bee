"""Commands about what a split program costs: memory, report.

Enters: a model or a program's text. Leaves: bytes a rank, or the whole report, as tables, JSON or one HTML file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fxpar.cli.inspection import Sizes, sizes_of
from fxpar.cli.output import CommandResult, Ui
from fxpar.cli.plan_flags import Request
from fxpar.cli.program_commands import OfStage, check_stage
from fxpar.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxpar.cost import Report as Figures

Optimizer = Annotated[
    str, typer.Option(metavar="KIND", help="adamw, sgd, sgd-momentum or none: what state a parameter has")
]
Device = Annotated[
    str, typer.Option(metavar="KIND", help="cpu or cuda: whose kernels are assumed; no GPU is needed to count")
]
_DEVICES = ("cpu", "cuda")
_MEMORY = (
    *("name", "plan", "sizes", "optimizer", "device"),
    *("ranks", "modules", "activations", "peak", "phases", "largest", "stages"),
)


def memory(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    optimizer: Optimizer = "adamw",
    device: Device = "cpu",
    of_stage: OfStage = None,
) -> CommandResult:
    """Counts the memory of a rank: parameters, gradients, optimizer, activations and the peak of a training step.

    Of a pipeline it is that of each rank, or with --of-stage that of one microbatch on that stage.
    """
    figures = _figures(ui, request, size or [], optimizer, device, of_stage=of_stage)
    document = figures.to_dict()

    def show(stdout: Console) -> None:
        from fxpar.cost.figures import as_group, memory_sections

        stdout.print(as_group(memory_sections(figures)))

    return CommandResult({key: document[key] for key in _MEMORY}, show)


def report(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    optimizer: Optimizer = "adamw",
    device: Device = "cpu",
    html: Annotated[str | None, typer.Option(metavar="FILE", help="write the report as one HTML file too")] = None,
) -> CommandResult:
    """Reports on a split model: passes, collectives, memory a rank, and what is not split and why."""
    figures = _figures(ui, request, size or [], optimizer, device, checked=True)
    if html is not None:
        from fxpar.cli.output import write_text
        from fxpar.cost.html import as_html

        write_text(Path(html), as_html(figures))

    def show(stdout: Console) -> None:
        stdout.print(figures)
        if html is not None:
            stdout.print(f"\nwritten to {html}", soft_wrap=True)

    document: dict[str, Any] = {**figures.to_dict(), "html": html}
    return CommandResult(document, show)


def _figures(
    ui: Ui,
    request: Request,
    size: Sequence[str],
    optimizer: str,
    device: str,
    *,
    checked: bool = False,
    of_stage: int | None = None,
) -> Figures:
    """The report of a model or text after all passes; nothing of it is run.

    Args:
        checked: whether the captured model is compared with the author's before.
    """
    from functools import partial
    from math import prod

    import torch

    from fxpar.cli.files import compared, open_start, run_passes
    from fxpar.compile import lower_program
    from fxpar.cost import make_report
    from fxpar.cost.measure import stand_in
    from fxpar.mesh.axes import joined_names
    from fxpar.ops.process_group import Group
    from fxpar.passes import DEFAULT_PASSES, counted_steps

    if device not in _DEVICES:
        raise InputError("is unknown", where=f"--device {device}", remedy=f"choose one of {', '.join(_DEVICES)}")
    assumed = torch.device(device)
    start = open_start(ui, request)
    check_stage(start, of_stage)
    sizes = sizes_of(start.program, size)
    findings = compared(ui, start) if checked else ()
    program, _ = run_passes(ui, start, DEFAULT_PASSES)
    with ui.working(f"counting {request.model}"):
        # Nothing is sent: the groups have names alone.
        world = {name: prod(program.axes[axis] for axis in name.split("-")) for name in joined_names(program.axes)}
        groups = {name: Group(name, ranks) for name, ranks in world.items()}
        lowering = partial(lower_program, groups=groups, device=stand_in(assumed))
        return make_report(
            program,
            counted_steps(program, lowering, of_stage=of_stage),
            name=start.name if of_stage is None else f"{start.name}, stage {of_stage}",
            device=assumed,
            sizes=sizes,
            optimizer=optimizer,
            findings=findings,
        )
