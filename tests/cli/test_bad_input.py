"""What a user may get wrong: exit status 2 and one line with the place, the reason and the remedy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.tool import TINY, fxpar

BIG = "hf:gpt2,n_layer=1,n_embd=4096,n_inner=16384"

# Words of a command line, `{small}` standing for the file of the small model, `{dump}` for a dump folder and `{tmp}`
# for a folder with odd files; and a part of the message.
CASES = {
    "unknown type": ("trace hf:nosuch", "has no model type 'nosuch'"),
    "misspelt type": ("trace hf:gtp2", "try gpt2"),
    "no type": ("trace hf:", "has no model type ''"),
    "unknown key": ("trace hf:gpt2,n_lear=2", "has no key 'n_lear'; choose from activation_function,"),
    "no value": ("trace hf:gpt2,n_layer", "'n_layer' is no key=value"),
    "word for a number": ("trace hf:gpt2,n_layer=two", "'n_layer' expected int, got str"),
    "no YAML": ("trace hf:gpt2,n_layer=[", "must be a value of YAML, got '['"),
    "sizes that do not fit": ("trace hf:gpt2,n_head=7", "`embed_dim` must be divisible by num_heads"),
    "no example for states": ("trace hf:decision_transformer", "want states; write a function"),
    "one sample": ("trace hf:gpt2 --batch 1", "--batch: 1 is too small; give at least 2"),
    "one token": ("trace hf:gpt2 --seq 1", "--seq: 1 is too small"),
    "nothing": ("trace nothing_here", "nothing_here: names no model and no existing file; write hf:TYPE"),
    "missing file": ("trace {tmp}/missing.py:build", "missing.py: there is no such file; check the path"),
    "missing module": ("trace nowhere.at_all:build", "No module named 'nowhere'"),
    "missing function": ("trace {small}:construct", "has no construct; name a function of the module"),
    "no function": ("trace {small}:NUMBER", "must be a function, got a int"),
    "function returns no model": ("trace {small}:wrong_result", "returns no (model, batch)"),
    "function returns no loss": (
        "trace {small}:wrong_loss",
        "the loss must be a callable or a name, got a int; return",
    ),
    "function raises": ("trace {small}:raises", "ValueError at fxpar_small_model.py:"),
    "syntax error": ("trace {tmp}/syntax.py:build", "SyntaxError"),
    "length of a function": ("trace {small}:build --seq 4", "--seq sizes the example of hf: models only"),
    "level": (f"verify {TINY} --level deep", "--level deep: is unknown; choose one of static, values"),
    "tp of zero": (f"trace {TINY} --tp 0", "tp must be an integer from 1 to 4096, got 0"),
    "negative seed": (f"trace {TINY} --seed -1", "seed must be an integer in"),
    "precision": (f"trace {TINY} --precision fp8", "precision='fp8' is unknown"),
    "recomputation": (f"trace {TINY} --recompute some", "recompute.mode='some' is unknown"),
    "budget": (f"trace {TINY} --recompute selective --activation-memory-budget 1GB", "must be a number, got '1GB'"),
    "budget of nothing": (f"trace {TINY} --activation-memory-budget 0.5", "is of mode='selective'"),
    "split without =": (f"trace {TINY} --split c_fc", "--split c_fc: names no value; write NAME=VALUE"),
    "split by a strange way": (f"trace {TINY} --split *=across", "='across' is unknown: choose one of column"),
    "split twice": (f"trace {TINY} --split a=row --split a=column", "--split a=column: contradicts --split a=row"),
    "batch dim without =": (f"trace {TINY} --batch-dims x", "--batch-dims x: names no value; write NAME=VALUE"),
    "batch dim that is no number": (
        f"trace {TINY} --batch-dims x=b",
        "--batch-dims x=b: must be a whole number, got 'b'; write NAME=VALUE",
    ),
    "batch dim of nothing": (f"run {TINY} --dp 2 --batch-dims moon=0", "batch_dims['moon']: names no input"),
    "norm by a strange way": (f"trace {TINY} --batch-norm local", "batch_norm='local' is unknown: choose one of"),
    "loss by a strange way": (f"trace {TINY} --loss-reduction max", "loss_reduction='max' is unknown: choose one of"),
    "split of nothing": ("run {small}:build --tp 2 --split moon=row", "split['moon']: matches no module"),
    "plan file": (f"trace {TINY} --plan {{tmp}}/missing.yaml", "missing.yaml: No such file"),
    "plan option": (f"trace {TINY} --plan {{tmp}}/odd.yaml", "odd.yaml: unknown option moon; choose from tp,"),
    "until no pass": (
        "run {small}:build --until moon",
        "--until moon: there is no such pass; choose from canonicalize",
    ),
    "until no pass of the step": (
        "run {small}:build --until moon",
        "localize, differentiate, recompute",
    ),
    "a pass that is left out": (
        "run {small}:build --until partition_stages",
        "--until partition_stages: the pass runs where the plan has a pipeline",
    ),
    "until a past pass": ("run {dump}/07-annotate.txt --until annotate", "the program has this pass behind it"),
    "print after no pass": ("run {small}:build --print-after moon", "--print-after moon: there is no such pass"),
    "flags on a text": ("run {dump}/07-annotate.txt --tp 4", "--tp: the plan stands in the text; edit its plan line"),
    "sizes on a text": ("verify {dump}/07-annotate.txt --seq 4", "--seq: the text is of a captured model"),
    "mode on a text": ("comm {dump}/07-annotate.txt --eval", "--train/--eval: the text is of a captured model"),
    "malformed text": ("verify {tmp}/malformed.txt", "malformed.txt:2: the plan is not JSON"),
    "no text": ("verify {tmp}/odd.yaml", "must be a program's text, which starts with 'fxpar 2'"),
    "values of a lone text": ("verify {tmp}/lone.txt --level values", "needs 00-capture.txt and values.safetensors"),
    "a symbol without values": (
        "verify {tmp}/symbol/12-localize.txt --level values",
        "has no size 'input_ids.0' for the symbol b",
    ),
    "values of another model": (
        "verify {tmp}/other/12-localize.txt --level values",
        "'state/transformer.wpe.weight' is f32[63, 96], the",
    ),
    "damaged values": ("verify {tmp}/damaged/12-localize.txt --level values", "values.safetensors: cannot be read"),
    "values of a big model": (f"verify {BIG}", "the model has no values: it was built without memory"),
    "bisection of a big model": (f"bisect {BIG}", "the model has no values"),
    "diff of one": ("diff {dump}/07-annotate.txt", "takes two texts and finds 1"),
    "diff with a missing file": ("diff {dump}/07-annotate.txt {tmp}/missing.txt", "missing.txt: No such file"),
    "diff of a missing pass": ("diff {dump} annotate moon", "holds no text after pass 'moon'; choose from capture"),
    "diff of an empty folder": ("diff {tmp}/empty a b", "empty: holds no NN-pass.txt"),
    "diff of a folder": ("diff {dump} {dump}", "Is a directory"),
    "size of no symbol": ("comm {dump}/12-localize.txt --size q=3", "--size q=3: must be a symbol of the program"),
    "size that is none": ("comm {dump}/12-localize.txt --size b=-3", "--size b=-3: must be a positive integer"),
    "bisection of a text": ("bisect {dump}/12-localize.txt", "one text has no passes to choose from"),
    "bisection of an empty folder": ("bisect {tmp}/empty", "empty: holds no NN-pass.txt"),
    "out in a file": ("trace {small}:build --out {tmp}/odd.yaml/a.txt", "odd.yaml/a.txt: "),
    "dump in a file": ("run {small}:build --dump {tmp}/odd.yaml", "odd.yaml/00-capture.txt: "),
    "passes that are none": ("passes --passes {small}:NUMBER", "must be a list of passes"),
    "no passes": ("passes --passes {small}:EMPTY", "must be a list of passes"),
    "unregistered pass": (
        "passes --passes {small}:UNREGISTERED",
        "; decorate it with @fxpar.register_pass",
    ),
    "faulty pass": ("run {small}:build --passes {small}:FAULTY", "faulty: TypeError at fxpar_small_model.py:"),
    "pass out of order": ("run {small}:build --passes {small}:FORGETFUL", "forgetful: requires moon"),
    "passes that end early": ("verify {small}:build --passes {small}:SHORT", "none of these passes makes the program"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, dump: Path) -> Path:
    """A folder of files that cannot be used."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "syntax.py").write_text("def build(:\n")
    (folder / "odd.yaml").write_text("moon: 2\n")
    (folder / "malformed.txt").write_text("fxpar 2\nplan {tp: 2}\n")
    (folder / "lone.txt").write_text((dump / "12-localize.txt").read_text())
    (folder / "empty").mkdir()
    for name in ("symbol", "other", "damaged"):
        (folder / name).mkdir()
        for path in (dump / "00-capture.txt", dump / "12-localize.txt", dump / "values.safetensors"):
            (folder / name / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "symbol" / "values.safetensors")
    del tensors["input/input_ids"]
    save_file(tensors, folder / "symbol" / "values.safetensors")
    tensors = load_file(folder / "other" / "values.safetensors")
    tensors["state/transformer.wpe.weight"] = torch.zeros(63, 96)
    save_file(tensors, folder / "other" / "values.safetensors")
    (folder / "damaged" / "values.safetensors").write_bytes(b"moon")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_status_2(name: str, small: str, dump: Path, odd: Path) -> None:
    line, message = CASES[name]
    words = [word.format(small=small, dump=dump, tmp=odd) for word in line.split()]
    result = fxpar(*words)
    assert result.status == 2, result.err
    assert result.out == ""
    assert message in result.err
    assert result.err.startswith("error: ")
    assert len(result.err.splitlines()) == 1
    assert "Traceback" not in result.err


def test_bad_input_with_json_is_a_document() -> None:
    result = fxpar("trace", "hf:gpt2,n_lear=2", "--json")
    assert result.status == 2
    assert result.document["ok"] is False
    error = result.document["error"]
    assert error["kind"] == "InputError"
    assert error["where"] == "hf:gpt2,n_lear=2"
    assert error["reason"] == "has no key 'n_lear'"
    assert "n_layer" in error["remedy"]
