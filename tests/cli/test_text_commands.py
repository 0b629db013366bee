"""Every command on texts, also on edited ones."""

import shutil
from pathlib import Path

import pytest

from fxpar.cli.differences import folded
from tests.cli.tool import fxpar


@pytest.fixture
def copy(dump: Path, tmp_path: Path) -> Path:
    """A dump folder to edit."""
    return Path(shutil.copytree(dump, tmp_path / "copy"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def without_reduction(path: Path) -> str:
    """Lets the user of the first reduction read the partial sum instead; returns the user's name."""
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "fxpar.reduce_from[tp]" in line)
    reduced, partial = lines[at].split(" ")[0], lines[at].split("(")[1].split(")")[0]
    user = next(i for i in range(at + 1, len(lines)) if f"{reduced}," in lines[i] or f"{reduced})" in lines[i])
    lines[user] = lines[user].replace(reduced, partial)
    path.write_text("\n".join(lines) + "\n")
    return lines[user].split(" ")[0]


def scaled(path: Path) -> None:
    """Makes the GELU compute something else that has the same shapes and layouts."""
    edit(path, ", 0.5) : f32", ", 0.25) : f32")


def test_trace_of_a_text_is_the_text(dump: Path) -> None:
    path = dump / "08-insert_collectives.txt"
    assert fxpar("trace", str(path)).out == path.read_text()
    assert fxpar("trace", str(path), "--json").document["how"] == "text"


def test_verify_accepts_what_was_dumped(dump: Path) -> None:
    for path in sorted(dump.glob("*.txt")):
        result = fxpar("verify", str(path), "--json")
        assert result.status == 0, result.err
        assert result.document["level"] == "static"
        assert result.document["ok"] is True


@pytest.mark.parametrize("name", ["12-localize.txt", "07-annotate.txt"])
def test_a_dumped_text_is_verified_by_value(dump: Path, name: str) -> None:
    result = fxpar("verify", str(dump / name), "--level", "values", "--json")
    assert result.status == 0, result.err
    assert result.document["ok"] is True
    assert result.document["max_grad_error"] < 1e-12
    assert result.document["gradients"] == 16


def test_a_text_without_its_reduction_is_rejected_by_name(copy: Path) -> None:
    user = without_reduction(copy / "12-localize.txt")
    result = fxpar("verify", str(copy / "12-localize.txt"))
    assert result.status == 1
    assert result.out == ""
    assert user in result.err
    assert len(result.err.splitlines()) == 1


def test_a_rejected_text_with_json_is_a_document(copy: Path) -> None:
    user = without_reduction(copy / "12-localize.txt")
    result = fxpar("verify", str(copy / "12-localize.txt"), "--json")
    assert result.status == 1
    assert result.document["ok"] is False
    error = result.document["error"]
    assert {"kind", "where", "reason", "remedy"} <= set(error)
    assert user in error["where"]
    assert error["reason"]


def test_a_text_with_other_values_passes_statically_and_fails_by_value(copy: Path) -> None:
    path = copy / "12-localize.txt"
    scaled(path)
    assert fxpar("verify", str(path)).status == 0
    result = fxpar("verify", str(path), "--level", "values", "--json")
    assert result.status == 1
    assert result.document["ok"] is False
    assert result.document["max_grad_error"] > 1e-6
    assert result.document["error"]["kind"] == "CheckFailed"
    assert "deviates by" in result.err
    table = fxpar("verify", str(path), "--level", "values")
    assert table.status == 1
    assert "FAILED at level values" in table.out


def test_run_goes_on_where_a_text_stops(dump: Path, tmp_path: Path) -> None:
    result = fxpar("run", str(dump / "07-annotate.txt"), "--dump", str(tmp_path / "d"), "--json")
    assert result.status == 0, result.err
    left = ["insert_collectives", "coalesce", "vocab_parallel", "assign_rng", "localize"]
    assert [record["name"] for record in result.document["passes"]] == left
    names = sorted(path.name for path in (tmp_path / "d").glob("*.txt"))
    assert names == ["00-capture.txt", *(f"{i:02d}-{name}.txt" for i, name in enumerate(["annotate", *left], 7))]
    assert (tmp_path / "d" / "12-localize.txt").read_text() == (dump / "12-localize.txt").read_text()
    assert fxpar("verify", str(tmp_path / "d" / "12-localize.txt"), "--level", "values").status == 0


def test_run_of_a_finished_text_has_nothing_to_do(dump: Path) -> None:
    path = dump / "12-localize.txt"
    assert fxpar("run", str(path), "--print", "--json").document["text"] == path.read_text()
    assert fxpar("run", str(path), "--json").document["passes"] == []


def test_a_rejected_program_is_dumped_too(copy: Path, tmp_path: Path) -> None:
    edit(copy / "07-annotate.txt", ", 0.5) : f32[b, s, 160]", ", 0.5) : f32[b, s, 96]")
    result = fxpar("run", str(copy / "07-annotate.txt"), "--dump", str(tmp_path / "d"))
    assert result.status == 1
    assert "found by the check 'shapes'" in result.err
    assert (tmp_path / "d" / "07-annotate.txt").is_file()


def test_comm_of_a_text_runs_the_passes_that_are_left(dump: Path) -> None:
    captured, finished = (
        fxpar("comm", str(dump / name), "--json").document["collectives"]
        for name in ("00-capture.txt", "12-localize.txt")
    )
    assert len(finished) == 8
    assert captured == finished


def test_diff_of_a_text_with_itself_is_empty(dump: Path) -> None:
    path = str(dump / "12-localize.txt")
    result = fxpar("diff", path, path)
    assert (result.status, result.out) == (0, "the programs are the same\n")
    assert fxpar("diff", path, path, "--json").document["same"] is True


def test_diff_between_two_passes_of_a_dump(dump: Path) -> None:
    result = fxpar("diff", str(dump), "annotate", "insert_collectives", "--json")
    assert result.status == 1
    found = result.document
    assert set(found) == {"same", "added", "erased", "changed", "moved", "header", "groups"}
    assert {entry["node"] for entry in found["added"]} >= {"addmm_1_reduce_from"}
    assert not found["erased"]
    assert all(entry["before"] != entry["after"] for entry in found["changed"])
    assert found["header"]["added"] == ["properties canonical collectives experts layouts masks sequence"]


def test_diff_shows_both_lines_of_a_changed_node(copy: Path, dump: Path) -> None:
    scaled(copy / "12-localize.txt")
    result = fxpar("diff", str(dump / "12-localize.txt"), str(copy / "12-localize.txt"))
    assert result.status == 1
    lines = result.out.splitlines()
    assert lines[0] == "1 node: operands changed (transformer.h.0: 1)"
    assert [line[0] for line in lines[1:]] == ["-", "+", "n"]
    assert ", 0.25)" in lines[2]
    assert lines[3] == "nodes: 0 added, 0 erased, 1 changed, 0 moved"


def test_diff_groups_what_differs_by_kind(dump: Path) -> None:
    words = ("diff", str(dump), "annotate", "insert_collectives")
    found = fxpar(*words, "--json").document
    for key in ("added", "erased", "changed", "moved"):
        nodes = [name for group in found["groups"] if group["sort"] == key for name in group["nodes"]]
        assert sorted(nodes) == sorted(entry if key == "moved" else entry["node"] for entry in found[key])
    assert all(group["count"] == len(group["nodes"]) for group in found["groups"])
    kinds = {group["kind"]: group for group in found["groups"]}
    dropped = kinds["note needs dropped"]
    pairs = {entry["node"]: entry for entry in found["changed"]}
    for name in dropped["nodes"]:
        before, after = pairs[name]["before"], pairs[name]["after"]
        assert "{needs=" in before
        assert "needs=" not in after
        assert before.partition(" {")[0] == after.partition(" {")[0].partition("  #")[0]
    assert "fxpar.reduce_from[tp]" in kinds
    printed = fxpar(*words).out.splitlines()
    many = f"{dropped['count']} nodes: note needs dropped ("
    at = next(i for i, line in enumerate(printed) if line.startswith(many))
    assert [line[0] for line in printed[at + 1 : at + 3]] == ["-", "+"]
    assert len(printed) < 40
    assert printed[-1].endswith("; --all prints every line")
    full = fxpar(*words, "--all").out.splitlines()
    assert sum(line.startswith("- %") for line in full) == len(found["changed"]) + len(found["erased"])


def test_layers_are_folded_where_their_numbers_follow_each_other() -> None:
    counts = {"h.0": 2, "h.1": 2, "h.2": 3, "head": 1, "x.1": 1, "x.3": 1}
    assert folded(counts) == ["h.0–2: 7", "head: 1", "x.1,3: 2"]


def test_diff_sees_that_two_lines_changed_places(copy: Path, dump: Path) -> None:
    path = copy / "12-localize.txt"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("%labels"))
    lines[at - 1], lines[at] = lines[at], lines[at - 1]
    path.write_text("\n".join(lines) + "\n")
    result = fxpar("diff", str(dump / "12-localize.txt"), str(path), "--json")
    assert result.status == 1
    assert len(result.document["moved"]) == 1
    assert not result.document["changed"]


@pytest.mark.matrix
def test_bisect_of_an_untouched_folder_finds_nothing(dump: Path) -> None:
    result = fxpar("bisect", str(dump), "--json")
    assert result.status == 0
    assert result.document["culprit"] is None
    assert "values are right" in result.document["reason"]


def test_bisect_names_the_first_text_that_is_rejected(copy: Path) -> None:
    user = without_reduction(copy / "08-insert_collectives.txt")
    without_reduction(copy / "12-localize.txt")
    result = fxpar("bisect", str(copy), "--json")
    assert result.status == 1
    assert result.document["culprit"] == "insert_collectives"
    assert user in result.document["reason"]


def test_bisect_names_the_first_text_with_other_values(copy: Path) -> None:
    for name in ("07-annotate.txt", "12-localize.txt"):
        scaled(copy / name)
    result = fxpar("bisect", str(copy))
    assert result.status == 1
    assert result.out.startswith("annotate: 07-annotate.txt: ")
    assert "deviates by" in result.out
    first = fxpar("bisect", str(copy), "--json").document["first"]
    assert f"the first node that deviates is {first['text']} in the forward of transformer.h.0" in result.out
    assert (first["layer"], first["module"]) == ("transformer.h.0", "transformer.h.0.mlp.act")


def test_a_dump_without_memory_is_checked_statically(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    big = "hf:gpt2,n_layer=1,n_embd=4096,n_inner=16384"
    assert fxpar("run", big, "--tp", "2", "--split", "*.c_fc=column", "--dump", str(folder)).status == 0
    assert not (folder / "values.safetensors").exists()
    assert "no values.safetensors" in fxpar("bisect", str(folder), "--json").document["reason"]
    refused = fxpar("verify", str(folder / "12-localize.txt"), "--level", "values")
    assert refused.status == 2
    assert "values.safetensors is missing" in refused.err
