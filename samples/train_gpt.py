"""Trains a GPT-2 by the recipe of the Megatron-LM paper, from a plan in YAML: a program to start your own from.

    python samples/train_gpt.py                                                  # two processes, tensor parallelism
    python samples/train_gpt.py --plan samples/plans/gpus8.yaml --size 2.5b      # eight GPUs
    torchrun --nproc-per-node 8 samples/train_gpt.py --plan samples/plans/gpus8.yaml --size 2.5b

The recipe: weights N(0, 0.02), residual projections scaled by 1/√(2L), dropout 0.1, AdamW with weight decay 0.01,
gradients clipped to norm 1, a linear warmup and a cosine decay. The text is the source of Python's standard library in
bytes, or `--text` in the tokens of `--tokenizer`; its last twentieth is held out. Every `--evaluate-every` steps the
program prints the perplexity of held-out text and how often the model knows the last word of a passage.

Started again with the same `--saves`, it goes on after the last save, under any other plan. All processes must see
that folder. It also has the tokens, in a file that is mapped into memory, and the metrics as lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, Dataset

import fxpar

PLANS = Path(__file__).parent / "plans"
# Width, heads and layers; from 1.2b on those of the paper.
SIZES = {
    "tiny": (128, 8, 4),
    "124m": (768, 12, 12),
    "355m": (1024, 16, 24),
    "1.2b": (1536, 16, 40),
    "2.5b": (1920, 20, 54),
    "8.3b": (3072, 32, 72),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=PLANS / "tp2_sequence.yaml", help="how to split (tp2_sequence)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of a new model (tiny)")
    parser.add_argument("--from", dest="source", type=Path, help="folder of a GPT-2 to start from, with its weights")
    parser.add_argument("--text", type=Path, nargs="+", help="files to train on (the standard library's source)")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (bytes)")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence (128)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, of all processes (8)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="steps in which the learning rate rises (20)")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (1e-3)")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=20_000, help="characters to evaluate on (20000)")
    parser.add_argument("--saves", type=Path, default=Path("saves"), help="folder of what a later run goes on from")
    parser.add_argument("--out", type=Path, help="new folder for a checkpoint that transformers reads")
    return parser.parse_args()


# The text.


def characters(files: list[Path] | None) -> str:
    """The text to train on and to hold out."""
    files = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


class Tokens:
    """From text to tokens: bytes, or those of a tokenizer."""

    def __init__(self, folder: Path | None) -> None:
        loader: Any = transformers.AutoTokenizer
        self.tokenizer: Any = None
        self.count = 256
        if folder is not None:
            self.tokenizer = loader.from_pretrained(folder)
            self.count = len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def passages(text: str, length: int) -> list[tuple[str, str]]:
    """Passages of whole words, at most so many characters; each without its last word, and that with a blank before."""
    windows: dict[int, list[tuple[int, int]]] = {}
    for match in re.finditer(r"\S+", text):
        begin, end = match.span()
        if begin // length == (end - 1) // length < len(text) // length:  # a window that is cut off has no last word
            windows.setdefault(begin // length, []).append((begin, end))
    return [
        (text[words[0][0] : words[-2][1]], " " + text[slice(*words[-1])])
        for words in windows.values()
        if len(words) > 1
    ]


def write_text(folder: Path, chosen: argparse.Namespace, tokens: Tokens) -> None:
    """Writes the tokens to train on, and what is held out of the text."""
    text = characters(chosen.text)
    cut = len(text) - len(text) // 20
    held_out = text[cut:][: chosen.held_out]
    examples = [tuple(map(tokens.encode, pair)) for pair in passages(held_out, chosen.length // 2)]
    folder.mkdir(parents=True, exist_ok=True)
    numpy.array(tokens.encode(text[:cut]), dtype=numpy.uint32).tofile(folder / "tokens.bin")
    numbers = {"tokens": tokens.encode(held_out), "words": len(held_out.split()), "examples": examples}
    (folder / "held_out.json").write_text(json.dumps(numbers))


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """The sequences of a file of tokens, which is mapped into memory."""

    def __init__(self, file: Path, length: int) -> None:
        self._tokens, self._length = numpy.memmap(file, dtype=numpy.uint32, mode="r"), length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._tokens[index * self._length : (index + 1) * self._length].astype(numpy.int64)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(ids)}


# The training.


def config_of(chosen: argparse.Namespace, vocabulary: int) -> Any:
    """GPT-2's configuration. Its own defaults are the paper's: dropout 0.1, N(0, 0.02), scaled residual projections."""
    if chosen.source is not None:
        return transformers.GPT2Config.from_pretrained(chosen.source, use_cache=False)
    width, heads, layers = SIZES[chosen.size]
    return transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=chosen.length,
        n_embd=width,
        n_head=heads,
        n_layer=layers,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def learning_rate(step: int, warmup: int, steps: int) -> float:
    """A share of the highest rate: linear warmup, then half a cosine down to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.495 * (1 + math.cos(math.pi * done))


def evaluate(model: fxpar.ParallelModule, held_out: dict[str, Any], chosen: argparse.Namespace) -> dict[str, float]:
    """Perplexity by tokens and by words, and cloze accuracy. All ranks must call it."""
    options: dict[str, Any] = {"window": chosen.length, "overlap": chosen.length // 2, "batch_size": chosen.batch}
    perplexity = fxpar.perplexity(model, held_out["tokens"], **options)
    tokens_a_word = (len(held_out["tokens"]) - 1) / held_out["words"]
    return {
        "perplexity": perplexity,
        "word_perplexity": math.exp(min(700.0, math.log(perplexity) * tokens_a_word)),  # as with words=…
        "cloze": fxpar.cloze_accuracy(model, held_out["examples"], batch_size=chosen.batch),
    }


class Log:
    """Appends records to a file, a line of JSON each, and shows those of evaluations as a table."""

    def __init__(self, file: Path) -> None:
        self._file, self._loss = file, math.nan
        self._table = Table("step", "samples", "loss", "perplexity", "word perplexity", "cloze accuracy")

    def __call__(self, record: dict[str, Any]) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        self._loss = record.get("loss", self._loss)
        if "cloze" in record:
            numbers = (self._loss, record["perplexity"], record["word_perplexity"], record["cloze"])
            self._table.add_row(str(record["step"]), str(record["samples"]), *(f"{n:.4g}" for n in numbers))

    def show(self) -> None:
        Console(width=100).print(self._table)


def train(chosen: argparse.Namespace) -> None:
    """What every process does."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plan, tokens, folder = fxpar.Plan.load(chosen.plan), Tokens(chosen.tokenizer), chosen.saves / "text"
    with torch.device("meta"):
        whole = transformers.GPT2LMHeadModel(config_of(chosen, tokens.count)).train()
    ids = torch.zeros(max(2, chosen.batch // plan.data_ranks), chosen.length, dtype=torch.int64)
    model = fxpar.parallelize(whole, plan, {"input_ids": ids, "labels": ids}, checkpoint=chosen.source)
    is_first = model.world.rank == 0
    if is_first and not (folder / "held_out.json").exists():
        write_text(folder, chosen, tokens)
    if model.world.size > 1:
        dist.barrier()
    held_out = json.loads((folder / "held_out.json").read_text())
    sequences = Sequences(folder / "tokens.bin", chosen.length)
    loader = DataLoader(sequences, batch_sampler=fxpar.BatchSampler(len(sequences), chosen.batch, model))
    no_decay: dict[Any, Any] = {(lambda name, parameter: parameter.ndim < 2): {"weight_decay": 0.0}}
    optimizer = fxpar.Optimizer(model, "adamw", lr=chosen.lr, weight_decay=0.01, max_norm=1.0, groups=no_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, chosen.warmup, chosen.steps)
    )
    log = Log(chosen.saves / "metrics.jsonl")
    fxpar.train(
        model,
        optimizer,
        loader,
        steps=chosen.steps,
        scheduler=scheduler,
        saves=chosen.saves,
        save_every=chosen.save_every,
        log_every=chosen.log_every,
        log=log,
        evaluate=lambda model: evaluate(model, held_out, chosen),
        evaluate_every=chosen.evaluate_every,
    )
    if is_first:
        log.show()
    if chosen.out is not None:
        model.save_checkpoint(chosen.out, tokenizer=tokens.tokenizer)


def main() -> None:
    chosen = options()
    size = fxpar.Plan.load(chosen.plan).world_size
    if "RANK" in os.environ or size == 1:
        train(chosen)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, size, run_id="train", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    elastic_launch(config, train)(chosen)


if __name__ == "__main__":
    main()
