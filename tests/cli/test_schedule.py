"""The command schedule: the JSON documents, the grid, the picture, files of a user's own, and refusals."""

import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from fxpar.cli.output import Ui
from fxpar.cli.schedule import ScheduleRequest, schedule
from fxpar.pipeline.compiler.builtin_schedules import SCHEDULES, build_schedule
from fxpar.pipeline.compiler.schedules import print_schedule
from tests.cli.tool import fxpar

ROOT = Path(__file__).resolve().parents[2]
INTERLEAVED = ("--pp", "4", "--virtual-stages", "2", "--microbatches", "8")

GRID = """\
1f1b: 2 ranks, 3 microbatches
rank  stages  warmup  in flight
   0  0            1          2
   1  1            0          1

time 0-12
rank 0 0F0 0F1 .   .   0B0---- 0F2 0B1---- .   0B2----
rank 1 .   1F0 1B0---- 1F1 1B1---- 1F2 1B2---- .   .
bubble 25.0 % of 2 ranks x time 12 (F 1, B 2)
"""


def without_rules(text: str) -> str:
    """Lines without the rule of a table and without blanks at their ends."""
    lines = [line.rstrip() for line in text.splitlines() if not re.fullmatch(r"[─+\-| ]+", line) or not line]
    return "\n".join(lines) + "\n"


def test_the_document_of_a_rank() -> None:
    result = fxpar("schedule", *INTERLEAVED, "--rank", "0", "--json")
    assert result.status == 0
    order = [1] * 4 + [2] * 4 + [1, 1, 1, -2, 1, -2, 2, -2, 2, -2, 2, -1, 2, -1, -1, -1] + [-2] * 4 + [-1] * 4
    assert result.document == {"order": order, "warmup": 10, "peak_in_flight": 11, "split_backward": False}


def test_weight_parts_are_halves_in_the_document() -> None:
    words = ("--schedule", "zb_h1", "--pp", "2", "--microbatches", "2", "--rank", "1", "--json")
    document = fxpar("schedule", *words).document
    assert document == {
        "order": [1, -1, 1, -1, -1.5, -1.5],
        "warmup": 0,
        "peak_in_flight": 2,
        "split_backward": True,
    }


def test_the_group_size_reaches_the_order() -> None:
    words = ("--pp", "2", "--virtual-stages", "2", "--microbatches", "5", "--group-size", "3", "--rank", "1", "--json")
    assert fxpar("schedule", *words).document["order"][:8] == [1, 1, 1, 2, -2, 2, -2, 2]


def test_the_document_of_all_ranks() -> None:
    document = fxpar("schedule", *INTERLEAVED, "--costs", "10,11,9", "--json").document
    ranks = document.pop("ranks")
    assert document == {
        **{"schedule": "interleaved_1f1b", "pp": 4, "virtual_stages": 2, "microbatches": 8, "group_size": 4},
        **{"style": "loop", "split_backward": False, "time": 570, "bubble": pytest.approx(3 / 19)},
        "costs": {"forward": 10, "backward_input": 11, "backward_weight": 9},
    }
    proven = build_schedule("interleaved_1f1b", pp=4, virtual_stages=2, microbatches=8)
    assert [rank["actions"] for rank in ranks] == [[str(a) for a in actions] for actions in proven.ranks]
    assert [rank["peak_in_flight"] for rank in ranks] == [11, 9, 7, 5]
    assert [rank["warmup"] for rank in ranks] == [10, 8, 6, 4]
    assert (ranks[1]["rank"], ranks[1]["stages"], ranks[1]["slots"]) == (1, [1, 5], [8, 4])
    assert ranks[3]["starts"][:2] == [30, 40]
    for rank in ranks:
        words = ("--rank", str(rank["rank"]), "--json")
        assert rank["order"] == fxpar("schedule", *INTERLEAVED, *words).document["order"]


def test_the_grid_shows_all_ranks_over_time() -> None:
    result = fxpar("schedule", "--pp", "2", "--microbatches", "3")
    assert result.status == 0
    assert without_rules(result.out) == GRID


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", ["4", "130"])
def test_the_grid_fits_a_narrow_terminal_and_starts_what_it_says(
    name: str, microbatches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stages = ("--virtual-stages", "2") if name == "zbv" else ()
    words = ("schedule", "--pp", "5", *stages, "--microbatches", microbatches, "--schedule", name)
    result = fxpar(*words)
    assert result.status == 0
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    starts = fxpar(*words, "--json").document["ranks"][4]
    row = "".join(line[7:].ljust(72) for line in lines if line.startswith("rank 4 "))
    shown = re.findall(r"\d+[FBIW]\d+", row)
    assert shown[0] == starts["actions"][0]
    assert shown == starts["actions"][: len(shown)]
    assert (len(shown) == len(starts["actions"])) == (microbatches == "4")
    assert ("left out: time " in result.out) == (microbatches == "130")


def test_costs_that_have_no_common_unit_are_rounded() -> None:
    result = fxpar("schedule", "--pp", "2", "--microbatches", "2", "--costs", "2147483647,1,1000000007")
    assert result.status == 0
    assert re.search(r"^rank 1 +(\.   )+1F0-+ 1B0-+ 1F1-+ 1B1-+( \.)*", result.out, re.MULTILINE)
    assert len(result.out) < 2000


def test_many_ranks_are_cut_and_the_grid_says_so() -> None:
    result = fxpar("schedule", "--pp", "40", "--microbatches", "40")
    assert "left out: ranks 16-39 (--json has all)" in result.out
    assert "rank 15 " in result.out
    assert "rank 16 " not in result.out


def test_a_terminal_gets_a_colour_for_each_phase_and_chunk() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=80, markup=False)
    schedule(Ui(False), ScheduleRequest(pp=2, virtual_stages=2, microbatches=2)).show(console)
    styled = dict(re.findall(r"48;2;(\d+;\d+;\d+)m([0-9][FB])", stream.getvalue()))
    assert len(styled) == 4  # forward and backward, each of two chunks
    assert re.search(r"48;2;207;227;245m0F0\x1b\[0m ", stream.getvalue())  # the blank behind has none


def test_a_rank_for_people() -> None:
    result = fxpar("schedule", *INTERLEAVED, "--rank", "3")
    assert "interleaved_1f1b: 4 ranks of 2 stages, 8 microbatches in groups of 4" in result.out
    assert "rank 3: stages 3, 7; warmup 4; 5 in flight" in result.out
    assert "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1" in result.out


def test_a_file_says_all_and_is_compared_with_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(print_schedule(build_schedule("zbv", pp=2, virtual_stages=2, microbatches=3)))
    document = fxpar("schedule", "--file", str(path), "--json").document
    assert (document["schedule"], document["style"], document["pp"], document["microbatches"]) == ("custom", "v", 2, 3)
    result = fxpar("schedule", "--file", str(path), "--microbatches", "4")
    assert result.status == 2
    assert f"{path}: has 3 microbatches, and 4 were asked for" in result.err


def test_orders_that_an_array_cannot_say_are_null_in_the_document_of_all(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    assert [rank["order"] for rank in fxpar("schedule", "--file", str(path), "--json").document["ranks"]] == [None] * 2
    result = fxpar("schedule", "--file", str(path), "--rank", "1", "--json")
    assert result.status == 2
    assert "rank 1, position 2 (1B1): an order array cannot say it" in result.err
    assert "1F0 1F1 1B1 1B0" in fxpar("schedule", "--file", str(path), "--rank", "1").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--pp: is not given; give it, or a --file that says it"),
        ("--pp 4", "--microbatches: is not given"),
        ("--pp 0 --microbatches 4", "pp: must be a positive integer, got 0"),
        ("--pp 4 --microbatches 4 --schedule fast", "schedule: 'fast' is unknown; choose gpipe, 1f1b, "),
        ("--pp 4 --microbatches 4 --rank 4", "--rank: there is no rank 4; choose from 0–3"),
        ("--pp 4 --microbatches 4 --rank -1", "--rank: there is no rank -1"),
        ("--pp 4 --microbatches 4 --costs 1,2", "--costs: must be three numbers, got '1,2'; write whole numbers as in"),
        ("--pp 4 --microbatches 4 --costs 1,2,x", "--costs: must be a whole number of at most 20 digits, got 'x'"),
        ("--pp 4 --microbatches 4 --costs 1,0,1", "cost backward_input: must be a positive integer below 2^31, got 0"),
        ("--pp 4 --microbatches 10 --virtual-stages 2", "group_size: 10 microbatches cannot be run in groups of 4"),
        ("--pp 4 --microbatches 3 --virtual-stages 2", "microbatches: interleaved_1f1b of 2 stages a rank needs a"),
        ("--pp 99999999999999999999 --microbatches 4", "are more than 1000000 forwards"),
        ("--file {tmp}/missing", "missing: No such file or directory; name a file"),
        ("--file {tmp}/mine --schedule zbv", "--schedule: says nothing of {tmp}/mine, which has its order; leave it"),
        ("--file {tmp}/mine --group-size 2", "--group-size: says nothing of {tmp}/mine"),
        ("--file {tmp}/mine", "rank 0, position 0 (0B0): needs 0F0, which the rank runs later, at position 1; put"),
        (
            "--file {tmp}/words",
            "words line 1 cell 2: must be an action, got 'what'; write stage, letter and microbatch",
        ),
        ("--pp 2 --microbatches 2 --svg /dev/null/a.svg", "/dev/null/a.svg: "),
    ],
)
def test_bad_input_ends_with_2_and_one_line(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("0B0,0F0")
    (tmp_path / "words").write_text("0F0,what")
    result = fxpar("schedule", *words.format(tmp=tmp_path).split())
    assert result.status == 2
    assert result.out == ""
    assert message.format(tmp=tmp_path) in result.err
    assert len(result.err.splitlines()) == 1


def test_the_picture_has_a_box_for_each_action_at_its_time(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "schedule.svg"
    words = ("--schedule", "zb_h1", "--pp", "3", "--microbatches", "11", "--costs", "2,3,1")
    result = fxpar("schedule", *words, "--svg", str(path))
    assert f"wrote {path}" in result.out
    document = fxpar("schedule", *words, "--json").document
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(path).getroot()
    boxes = [group for group in root.iter(f"{space}g") if group.get("class") == "action"]
    found = {}
    for group in boxes:
        box, text, title = (group.find(f"{space}{tag}") for tag in ("rect", "text", "title"))
        assert box is not None
        assert text is not None
        assert title is not None
        word = str(title.text).partition(":")[0]
        assert str(text.text) == re.split("[FBIW]", word)[1]
        found[word] = (float(box.get("x", "")), float(box.get("y", "")), box.get("fill"))
    places = sorted(found.values())
    scale = next(x for x, _, _ in places if x) / 2  # rank 1 starts after a forward
    for rank in document["ranks"]:
        for word, start in zip(rank["actions"], rank["starts"], strict=True):
            x, y, _ = found.pop(word)
            assert y == 30 * rank["rank"] + 2
            assert x == pytest.approx(start * scale, abs=0.1)
    assert not found
    texts = [text.text for text in root.iter(f"{space}text")]
    assert "zb_h1: 3 ranks, 11 microbatches" in texts
    assert [text for text in texts if text and text.endswith(")")] == [
        "forward (2)",
        "input part of the backward (3)",
        "weight part of the backward (1)",
    ]


def test_a_large_picture_is_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    result = fxpar("schedule", "--pp", "70", "--microbatches", "400", "--svg", str(path), "--json")
    assert result.status == 0
    text = path.read_text()
    assert len(text) < 10_000_000
    assert re.search(r"time 0–\d+ of 1407; the first 64 of 70 ranks", text)


def test_the_command_needs_no_torch_and_no_more_than_ascii() -> None:
    code = (
        "import sys; from fxpar.cli.main import main\n"
        f"assert main(['schedule', *{INTERLEAVED}, '--svg', '/dev/null']) == 0\n"
        f"assert main(['schedule', *{INTERLEAVED}, '--json']) == 0\n"
        "print(sorted({'torch', 'numpy', 'sympy'} & set(sys.modules)), file=sys.stderr)"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "80"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=ascii_only, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout.isascii()
    assert "\\u" not in done.stdout
