"""Whether a step fits and how long it takes: sums of parts, pipelines by hand, tokens and FLOPs under every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpar.cost.figures import all_sections
from fxpar.cost.verdict import PEAK_FLOPS, Machine, Verdict, fit_text, machine_of
from fxpar.pipeline.compiler.partition import run_pipeline
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.text.tables import amount
from tests.cost.test_report import report_of


def verdict_of(name: str, plan: Plan, memory: int | None = None) -> Verdict:
    verdict = report_of(name, plan, memory).verdict
    assert verdict is not None
    return verdict


PLANS = {
    "one": Plan(),
    "tp": Plan(tp=2, compile=True),
    "dp": Plan(dp=3, microbatches=3),
    "shared": Plan(tp=2, dp=3, shard="parameters"),
    "pp": Plan(pp=2, microbatches=4),
    "interleaved": Plan(pp=2, virtual_stages=2, microbatches=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_seconds_are_the_sum_of_their_parts(plan: Plan) -> None:
    report = report_of("gpt2", plan)
    verdict = report.verdict
    assert verdict is not None
    assert verdict.seconds is not None
    parts = (verdict.products, verdict.waits, verdict.stored, verdict.optimizer, verdict.idle)
    assert verdict.seconds == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert verdict.products > 0
    assert (verdict.waits > 0) == (plan.tp * plan.dp > 1)
    if plan.pp == 1:
        assert verdict.idle == 0
        (step,) = report.steps
        exposed = sum(travel.exposed for travel in step.times.travels)
        if plan.microbatches == 1:
            assert verdict.waits == pytest.approx(exposed)
    else:
        assert verdict.idle > 0


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_tokens_and_flops_are_the_authors_under_every_plan(plan: Plan) -> None:
    one, split = verdict_of("gpt2", Plan()), verdict_of("gpt2", plan)
    assert split.tokens == one.tokens * plan.microbatches == 3 * 16 * plan.microbatches
    assert split.flops == pytest.approx(one.flops * plan.microbatches)
    assert split.seconds is not None
    assert split.mfu == pytest.approx(split.flops / split.seconds / split.ranks / PEAK_FLOPS["H200"])


def test_equal_stages_take_as_long_as_one_f_one_b() -> None:
    """Two ranks and m microbatches: the last ends after m + 1 forwards and backwards; with 1F1B, one of each idle."""
    for count in (1, 2, 5):
        run = run_pipeline(Plan(pp=2, microbatches=count), [(1.0, 2.0), (1.0, 2.0)])
        assert run.seconds == pytest.approx(3.0 * (count + 1))
        busy = [sum(action.end - action.start for action in actions) for actions in run.ranks]
        assert busy == pytest.approx([3.0 * count] * 2)


def test_a_slow_stage_sets_the_pace() -> None:
    run = run_pipeline(Plan(pp=2, microbatches=8), [(1.0, 2.0), (3.0, 6.0)])
    assert run.seconds == pytest.approx(8 * 9.0 + 1.0 + 2.0)


def test_a_schedule_that_cannot_be_is_said() -> None:
    """Interleaved schedules need as many microbatches as ranks."""
    verdict = verdict_of("gpt2", Plan(pp=2, virtual_stages=2))
    assert verdict.seconds is None
    assert verdict.tokens_per_second is verdict.mfu is None
    assert "microbatches" in verdict.unknown
    text = " ".join(str(report_of("gpt2", Plan(pp=2, virtual_stages=2))).split())
    assert f"step not known: {verdict.unknown}"[:60] in text


def test_it_fits_or_says_how_much_is_missing() -> None:
    verdict = verdict_of("gpt2", Plan(tp=2))
    assert verdict.fits
    assert verdict.machine.name == "H200"
    assert fit_text(verdict).startswith("fits: rank 0 needs ")
    short = replace(verdict, machine=Machine("H200", verdict.peak - 2048, None))
    assert not short.fits
    assert fit_text(short).endswith(f"2.0 KiB more than {amount(verdict.peak - 2048)}")
    assert verdict_of("gpt2", Plan(tp=2), verdict.peak).fits
    assert not verdict_of("gpt2", Plan(tp=2), verdict.peak - 1).fits


def test_another_machine_has_no_name_and_no_peak() -> None:
    machine = machine_of(Cost(flops=250e12))
    assert (machine.memory, machine.flops) == (None, None)
    verdict = verdict_of("gpt2", Plan(cost=Cost(flops=250e12)))
    assert verdict.fits is verdict.mfu is None
    assert verdict.rate is not None
    assert "is not known" in fit_text(verdict)


def test_the_report_leads_with_it() -> None:
    report = report_of("gpt2", Plan(tp=2))
    titles = [section.title for section in all_sections(report)]
    assert titles[:4] == ["gpt2", "plan", "what is split", "not split"]
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[3].startswith("memory fits: rank 0 needs")
    assert any("MFU" in line and "H200" in line for line in lines[:8])
    assert any(line.startswith("transformer.h.0–1.attn.c_attn.weight f32[96, 288] tp:S(1:") for line in lines)
    document = report.to_dict()
    assert document["verdict"]["fits"] is True
    assert "steps" not in document


@pytest.mark.parametrize(("name", "times"), [("gpt2", 1.25), ("vit", 2.5)])
def test_the_backward_of_attention_takes_five_products_of_which_a_mask_hides_half(name: str, times: float) -> None:
    """A forward has two products, and is counted whole."""
    (step,) = report_of(name, Plan(tp=2, cost=Cost(multiprocessors=1))).steps
    seconds: dict[str, set[float]] = {"attention_forward": set(), "attention_backward": set()}
    for node in step.program.graph.nodes:
        if str(node.target).removeprefix("fxpar.") in seconds:
            seconds[str(node.target).removeprefix("fxpar.")].add(step.times.products[node.name][1])
    (forward,), (backward,) = seconds.values()
    assert backward == pytest.approx(times * forward)
    assert forward > 0
