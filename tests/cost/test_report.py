"""What a report says: reasons, tables, one file of HTML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser

import pytest
import torch

from fxpar.capture.capture import capture
from fxpar.cost import Report, ReportBasis, make_report
from fxpar.cost.html import as_html
from fxpar.manager import PassManager
from fxpar.ops.lower import lower
from fxpar.ops.process_group import Group
from fxpar.passes import DEFAULT_PASSES, counted_steps
from fxpar.pipeline.compiler.partition import run_pipeline
from fxpar.plan.plan import Plan
from tests.zoo import CASES

CPU = torch.device("cpu")


@cache
def report_of(name: str, plan: Plan, memory: int | None = None) -> Report:
    case = CASES[name]
    captured = capture(case.model(), case.example(), plan, case.loss).program
    program = PassManager(DEFAULT_PASSES).run(captured)
    lowering = partial(lower, groups={axis: Group(axis, n) for axis, n in program.axes.items()})
    basis = ReportBasis((), captured, memory, run_pipeline)
    return make_report(program, counted_steps(program, lowering), name=name, device=CPU, basis=basis)


@pytest.fixture(scope="module")
def llama() -> Report:
    return report_of("llama", Plan(tp=8))


@pytest.fixture(scope="module")
def vit() -> Report:
    return report_of("vit", Plan(tp=4, sequence_parallel=True))


def test_every_part_adds_up(llama: Report) -> None:
    for rank in llama.ranks:
        for part in ("parameters", "gradients", "optimizer", "activations"):
            assert getattr(rank, part) == sum(getattr(module, part) for module in llama.modules)
        assert rank.peak > rank.parameters + rank.optimizer + rank.activations
        assert rank.optimizer - 2 * rank.gradients == 4 * len(list(CASES["llama"].model().parameters()))
    assert llama.size.elements == sum(p.numel() for p in CASES["llama"].model().parameters())
    assert llama.size.rank_elements * 4 == llama.ranks[0].parameters
    assert [p.name for p in llama.passes] == [item.name for item in DEFAULT_PASSES if item.name != "partition_stages"]


def test_shared_key_heads_and_padding_are_counted(llama: Report) -> None:
    # Four heads of 12 for eight ranks: matrices and biases of keys and values of two layers, a head on each rank.
    assert {rank.shared for rank in llama.ranks} == {2 * 2 * (12 * 96 + 12) * 4}
    # 259 words, 33 a rank: the last holds 28 of them, in the table and in the head.
    assert [rank.padding for rank in llama.ranks] == [0] * 7 + [2 * 5 * 96 * 4]


def test_the_padding_of_activations_travels_and_is_counted() -> None:
    """160 features over three ranks are gathered as 162: the listed bytes are checked against the step's."""
    assert report_of("gpt2", Plan(tp=3)).collectives


def test_what_sequence_parallelism_could_not_cut_is_said(vit: Report) -> None:
    (remark,) = vit.remarks
    assert remark.startswith("sequence_parallel cut nothing: attention runs over 17 tokens")
    assert remark in str(vit)
    whole = {entry.parameter: entry for entry in vit.unsplit}
    assert whole["vit.embeddings.position_embeddings"].bytes == 17 * 96 * 4
    assert "would take longer" in whole["vit.embeddings.position_embeddings"].reason


def test_printed_it_is_tables(llama: Report) -> None:
    lines = [" ".join(line.split()) for line in str(llama).splitlines()]
    assert "plan tp=8" in lines
    assert "what rank 0–6, each rank 7" in lines
    assert "padding 0 B 3.8 KiB" in lines
    assert "tp forward all_reduce 7 0 0 90.6 KiB 92,736 1932*b*s" in lines
    assert any(line.startswith("annotate ") for line in lines)
    assert max(len(line) for line in str(llama).splitlines()) <= 120
    assert json.loads(json.dumps(llama.to_dict()))["plan"] == {"tp": 8}


class Page(HTMLParser):
    """Tags that are open at the end, attributes that load something, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)
        loads = [(name, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.loads += [name for name, value in loads if not value.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_one_file_that_loads_nothing(llama: Report) -> None:
    text = as_html(replace(llama, name="<b>llama</b> & co"))
    page = Page()
    page.feed(text)
    assert (page.open, page.loads) == ([], [])
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert "<b>llama" not in text
    assert "<b>llama</b> & co" in page.text
    for cell in ("model.layers.0–1, each", "1932*b*s", "all_reduce", "annotate"):
        assert cell in page.text
