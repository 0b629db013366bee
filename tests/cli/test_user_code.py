"""Models and passes of a user's own, from the first command to the last."""

from pathlib import Path

import pytest

from tests.cli.tool import fxpar

SPLIT = ("--tp", "2", "--split", "fc=column", "--split", "proj=row")


def test_a_users_model_is_verified(small: str) -> None:
    found = fxpar("verify", f"{small}:build", *SPLIT, "--json").document
    assert found["ok"] is True
    assert found["split_flops"] == 1
    assert found["gradients"] == 4


def test_a_model_without_a_loss_is_traced(small: str) -> None:
    assert fxpar("trace", f"{small}:without_loss", "--json").document["loss"] == ""


def test_what_a_model_prints_stays_out_of_the_document(small: str) -> None:
    result = fxpar("trace", f"{small}:noisy", "--json")
    assert result.document["loss"] == "loss"
    assert "a word on stdout" in result.err


def test_a_users_pass_is_listed_and_run(small: str) -> None:
    names = [entry["name"] for entry in fxpar("passes", "--passes", f"{small}:GOOD", "--json").document]
    assert names[:2] == ["canonicalize", "nothing"]
    found = fxpar("run", f"{small}:build", *SPLIT, "--passes", f"{small}:GOOD", "--json").document
    assert [record["name"] for record in found["passes"]] == names
    assert fxpar("verify", f"{small}:build", *SPLIT, "--passes", f"{small}:GOOD").status == 0


def test_a_wrong_pass_is_found_by_value(small: str) -> None:
    result = fxpar("bisect", f"{small}:build", *SPLIT, "--passes", f"{small}:WRONG", "--json")
    assert result.status == 1
    assert result.document["culprit"] == "halve"
    assert "deviates by" in result.document["reason"]
    verified = fxpar("verify", f"{small}:build", *SPLIT, "--passes", f"{small}:WRONG", "--json")
    assert verified.status == 1
    assert verified.document["ok"] is False
    assert verified.document["error"]["where"].startswith("gradient of ")


def test_a_wrong_pass_is_found_in_a_dump(small: str, tmp_path: Path) -> None:
    passes = ("--passes", f"{small}:WRONG")
    assert fxpar("run", f"{small}:build", *SPLIT, *passes, "--dump", str(tmp_path / "d")).status == 0
    result = fxpar("bisect", str(tmp_path / "d"), *passes, "--json")
    assert result.status == 1
    assert result.document["culprit"] == "halve"


@pytest.mark.parametrize("name", ["faulty", "forgetful"])
def test_a_pass_that_fails_is_the_culprit(small: str, name: str) -> None:
    result = fxpar("bisect", f"{small}:build", *SPLIT, "--passes", f"{small}:{name.upper()}", "--json")
    assert result.status == 1
    assert result.document["culprit"] == name
    assert name in result.document["reason"]
