"""A further program of a module: its parameters lie where those of the first do, whatever pass chooses layouts."""

from __future__ import annotations

import pytest

from tests.runtime import further_jobs, models
from tests.runtime.world import World


def test_a_wrapped_annotate_keeps_the_layouts_of_the_module(world2: World) -> None:
    loss = models.tiny(dropout=0.0)(**models.batch())["loss"].item()
    for found in world2.run(further_jobs.evaluate, True):
        assert found == pytest.approx({"trained": loss, "evaluated": loss}, rel=1e-6)


def test_a_pass_that_chooses_anew_is_refused_by_name(world2: World) -> None:
    for found in world2.run(further_jobs.evaluate, False):
        kind, where, reason, remedy = found["told"]
        assert (kind, where) == ("InputError", "up.weight")
        assert reason == (
            "the pass 'mine' gives it the layout tp:S(1) in this call's program, and the module has it in tp:S(0)"
        )
        assert remedy == ("have it call `annotate`, which keeps what the module has, or call the module as the example")
