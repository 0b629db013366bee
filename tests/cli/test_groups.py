"""The command groups: the JSON document, tables, the grid, the picture, and refusals."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from fxpar.cli.groups import COLOURS, groups, rows, short, tag
from fxpar.cli.output import Ui
from fxpar.mesh.axes import Axes
from fxpar.mesh.mesh import Mesh
from tests.cli.tool import fxpar

ROOT = Path(__file__).resolve().parents[2]
FOLDED = ("--world-size", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4")


def lists(found: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(group) for group in found]


def test_the_document_holds_the_groups_of_both_parts() -> None:
    result = fxpar("groups", *FOLDED, "--json")
    assert result.status == 0
    mesh = Mesh(world_size=16, tp=4, pp=2, etp=1, ep=4)
    assert result.document == {
        "dense": {name: lists(mesh.groups(name)) for name in ("tp", "cp", "dp", "pp", "dp-cp")},
        "expert": {name: lists(mesh.groups(name)) for name in ("etp", "ep", "edp", "pp")},
    }
    assert result.document["dense"]["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_groups_that_are_asked_for_stand_in_their_part() -> None:
    names = ("tp-pp", "tp-ep", "embedding", "tp-pp", "dp")
    result = fxpar("groups", *FOLDED, "--json", *(word for name in names for word in ("--group", name)))
    assert list(result.document["dense"]) == ["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "embedding"]
    assert list(result.document["expert"]) == ["etp", "ep", "edp", "pp", "tp-ep"]
    assert result.document["dense"]["tp-pp"] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert result.document["dense"]["embedding"][0] == [0, 8]


def test_order_offset_and_factors_reach_the_mesh() -> None:
    words: tuple[str, ...] = ("--world-size", "8", "--tp", "2", "--pp", "2", "--ep", "2", "--order", "tp-cp-pp-ep-dp")
    assert fxpar("groups", *words, "--json").document["dense"]["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    words = ("--tp", "2", "--dp", "2", "--rank-offset", "8")
    assert fxpar("groups", *words, "--json").document["dense"]["dp"] == [[8, 10], [9, 11]]
    words = ("--tp", "4", "--kv-heads", "2", "--cp", "4", "--hierarchical-cp", "2,2")
    dense = fxpar("groups", *words, "--json").document["dense"]
    assert list(dense)[-4:] == ["kv_in", "kv_out", "cp1", "cp2"]
    assert dense["kv_out"][0] == [0, 2]
    assert dense["cp2"][0] == [0, 8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world-size", "16", "--tp", "3"), "the world size 16 is not a multiple of tp·cp·pp = 3·1·1 = 3"),
        (("--world-size", "16", "--tp", "4", "--dp", "2"), "dp=2 differs from the world size 16"),
        (
            ("--world-size", "16", "--tp", "2", "--pp", "2", "--ep", "2", "--etp", "1", "--order", "tp-cp-pp-ep-dp"),
            "[0, 2], [1, 3], …, differ from those of the expert part, [0, 1], [2, 3], …",
        ),
        (("--virtual", "2"), "virtual=2 stages a rank need a pipeline, and pp=1"),
        (
            ("--cp", "4", "--hierarchical-cp", "2,x"),
            "20 digits, got 'x'; write whole numbers as in 2,2,4",
        ),
        (
            ("--cp", "4", "--hierarchical-cp", ""),
            "--hierarchical-cp: must be a whole number",
        ),
        (("--tp", "2", "--group", "ep-cp"), "'cp' is not an axis of the expert part"),
        (("--tp", "2", "--svg", "/dev/null/picture.svg"), "/dev/null/picture.svg: "),
    ],
)
def test_bad_input_ends_with_2_and_one_line(words: tuple[str, ...], message: str) -> None:
    result = fxpar("groups", *words)
    assert result.status == 2
    assert result.out == ""
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_tables_name_the_groups_and_what_they_are_for() -> None:
    result = fxpar("groups", *FOLDED)
    assert result.status == 0
    assert "dense part: 16 ranks = tp 4 · cp 1 · dp 2 · pp 2" in result.out
    assert re.search(r"^tp +4 +4 +a\[0–3\] b\[4–7\] c\[8–11\] d\[12–15\] +split each layer", result.out, re.MULTILINE)
    assert re.search(r"^etp +16 +1 +each rank alone", result.out, re.MULTILINE)
    assert "tp = ep: 4 groups of 4 ranks" in result.out
    assert re.search(r"^pp 1 +8c +9c +10c +11c +12d +13d +14d +15d", result.out, re.MULTILINE)
    assert "dp = dp-cp = edp: 8 groups of 2 ranks" in result.out


def test_stages_of_a_virtual_pipeline_are_listed() -> None:
    out = fxpar("groups", "--tp", "2", "--pp", "2", "--virtual", "3").out
    assert re.search(r"^ *1 +1 3 5 *$", out, re.MULTILINE)
    assert "stages" not in fxpar("groups", "--tp", "2").out


def test_a_world_of_one_has_no_grid() -> None:
    assert "every rank is alone" in fxpar("groups").out


def test_a_terminal_gets_a_colour_for_each_group() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=120, markup=False)
    groups(Ui(False), Mesh(tp=2, dp=2)).show(console)
    ranks = ((0, 1, 2), (1, 2, 3))  # of the first and the second group over tp, and over dp
    for number in (0, 1):
        red, green, blue = (int(COLOURS[number][place : place + 2], 16) for place in (1, 3, 5))
        coloured = re.findall(rf"48;2;{red};{green};{blue}m(.*?)\x1b\[0m", stream.getvalue())
        found = " ".join(coloured).split()
        assert {word for word in found if word != tag(number)} == {f"{rank}{tag(number)}" for rank in ranks[number]}
        assert tag(number) in found  # in the tables


def test_a_large_world_is_cut_and_says_so(tmp_path: Path) -> None:
    picture = tmp_path / "sub" / "groups.svg"
    words = ("--world-size", "16384", "--tp", "8", "--pp", "16", "--ep", "8", "--etp", "1")
    result = fxpar("groups", *words, "--svg", str(picture))
    assert result.status == 0
    assert "of 16384 (--json has all)" in result.out
    assert len(result.out) < 20_000
    assert "the first 384 of 16384 ranks" in picture.read_text()
    assert f"wrote {picture}" in result.out


def test_a_table_says_how_many_groups_it_leaves_out() -> None:
    stream = io.StringIO()
    groups(Ui(False), Mesh(tp=8, dp=64)).show(Console(file=stream, width=400, markup=False))
    (line,) = (line for line in stream.getvalue().splitlines() if line.startswith("tp  "))
    (more,) = re.findall(r"… (\d+) more", line)
    assert len(re.findall(r"[a-z]+\[", line)) + int(more) == 64


def test_the_document_of_a_large_world_is_whole() -> None:
    result = fxpar("groups", "--world-size", "16384", "--tp", "8", "--pp", "16", "--ep", "8", "--etp", "1", "--json")
    for name, found in {**result.document["dense"], **result.document["expert"]}.items():
        assert sorted(rank for group in found for rank in group) == list(range(16384)), name


def test_the_picture_colours_every_rank_by_its_group(tmp_path: Path) -> None:
    picture = tmp_path / "groups.svg"
    result = fxpar("groups", *FOLDED, "--group", "embedding", "--svg", str(picture), "--json")
    assert result.status == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(picture).getroot()
    titles = [text.text for text in root.iter(f"{space}text") if text.get("font-size") == "14"]
    assert titles == [
        "tp = ep: 4 groups of 4 ranks",
        "dp = dp-cp = edp: 8 groups of 2 ranks",
        "pp = embedding: 8 groups of 2 ranks",
    ]
    mesh = Mesh(world_size=16, tp=4, pp=2, etp=1, ep=4)
    for panel, name in zip(root.findall(f"{space}g"), ("tp", "dp", "pp"), strict=True):
        cells = [box for box in panel.findall(f"{space}rect") if box.get("rx") == "3"]
        texts = [text.text for text in panel.findall(f"{space}text") if text.get("text-anchor") == "middle"]
        assert texts == [str(rank) for rank in range(16)]
        for rank, box in enumerate(cells):
            number = next(number for number, group in enumerate(mesh.groups(name)) if rank in group)
            assert box.get("fill") == COLOURS[number]
        legend = [text.text for text in panel.findall(f"{space}text") if text.get("fill") is None]
        assert f"a {short(mesh.groups(name)[0])}" in legend


def test_64_ranks_are_in_one_screen(tmp_path: Path) -> None:
    picture = tmp_path / "groups.svg"
    assert (
        fxpar("groups", "--world-size", "64", "--tp", "8", "--pp", "2", "--ep", "4", "--svg", str(picture)).status == 0
    )
    root = ElementTree.parse(picture).getroot()
    assert int(root.get("width", "0")) <= 1280
    assert int(root.get("height", "0")) <= 720


def test_rows_follow_the_axes() -> None:
    inside, found = rows(Axes((("tp", 4), ("cp", 1), ("dp", 8), ("pp", 2))), 16)
    assert inside == ["tp", "dp (in parts)"]
    assert [row.label for row in found] == ["pp 0 dp 0–3", "pp 0 dp 4–7", "pp 1 dp 0–3", "pp 1 dp 4–7"]
    assert [row.ranks for row in found] == [range(start, start + 16) for start in (0, 16, 32, 48)]
    _, found = rows(Axes((("tp", 5), ("dp", 2)), offset=3), 3)
    assert [(row.label, row.ranks) for row in found] == [
        ("dp 0 tp 0–2", range(3, 6)),
        ("dp 0 tp 3–4", range(6, 8)),
        ("dp 1 tp 0–2", range(8, 11)),
        ("dp 1 tp 3–4", range(11, 13)),
    ]
    inside, found = rows(Axes((("pp", 4), ("tp", 2))), 16)
    assert (inside, len(found)) == (["pp", "tp"], 1)


def test_tags_count_on_after_z() -> None:
    assert [tag(number) for number in (0, 25, 26, 27, 51, 52, 701, 702)] == "a z aa ab az ba zz aaa".split()


def test_short_groups() -> None:
    assert short((4, 5, 6, 7)) == "[4–7]"
    assert short((4, 5)) == "[4,5]"
    assert short(tuple(range(0, 40, 2))) == "[0,2,4,6,8,10,…,38]"


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; from fxpar.cli.main import main\n"
        "assert main(['groups', '--tp', '2', '--pp', '2', '--svg', sys.argv[1]]) == 0\n"
        "assert main(['groups', '--tp', '2', '--json']) == 0\n"
        "print(sorted({'torch', 'numpy', 'sympy'} & set(sys.modules)), file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "/dev/null"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
