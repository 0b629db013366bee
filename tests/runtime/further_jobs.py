"""Modules whose `annotate` is wrapped or replaced, and their second program."""

from __future__ import annotations

from contextvars import Context
from dataclasses import replace
from itertools import chain, repeat

import fxpar
from fxpar.ir.program import Program
from fxpar.passes import DEFAULT_PASSES, annotate
from tests.runtime import models
from tests.runtime.jobs import Found, refusal, tp

_OTHER_SPLIT = {"up": "row", "down": "column"}


def evaluate(is_wrapped: bool) -> Found:
    """Trains, then evaluates with a program for which the pass has another split; what it gives, or is told."""
    splits = chain([models.SPLIT], repeat(_OTHER_SPLIT))

    def run(program: Program) -> Program:
        """Splits each program by the next plan."""
        plan = program.plan
        program = program.with_(plan=plan.replace(split=next(splits)))
        # Outside of the context nothing says what the module holds: as a pass that chooses by itself.
        chosen = annotate(program) if is_wrapped else Context().run(annotate, program)
        return chosen.with_(plan=plan)

    passes = [replace(annotate, name="mine", run=run) if item is annotate else item for item in DEFAULT_PASSES]
    batch = models.batch()
    model = fxpar.parallelize(models.tiny(dropout=0.0), models.plan(tp()), batch, passes=passes)
    trained = model.train_step(batch)
    model.eval()
    if is_wrapped:
        return {"trained": float(trained), "evaluated": float(model(**batch)["loss"])}
    return {"trained": float(trained), "told": refusal(lambda: model(**batch))}
