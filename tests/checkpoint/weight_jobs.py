"""What the ranks of a test world do with weights, and the same on one process; see `jobs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.layout.layout import Layout, shard
from fxpar.runtime.shard_spec import ShardSpec
from fxpar.runtime.sharded import Sharded
from tests.checkpoint.live import LiveBytes
from tests.runtime import models
from tests.runtime.jobs import Found, kept, refusal, tp

SEED, LIMIT = 7, 1000
_WORDS: dict[str, Any] = {"vocab_size": 29, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama() -> nn.Module:
    """A vocabulary that no number of ranks divides; tied words."""
    return models.llama(tie_word_embeddings=True, **_WORDS)


def gpt2() -> nn.Module:
    """One matrix for q, k and v."""
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size: Any = transformers.GPT2Config
    return transformers.GPT2LMHeadModel(
        size(n_layer=1, n_embd=16, n_head=4, n_inner=24, n_positions=8, **still, **_WORDS, use_cache=False)
    )


class Resettable(models.Tiny):
    """Tells how its own parameter and buffers begin."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.unused)
        self.get_buffer("scale").fill_(0.5)
        self.get_buffer("shift").copy_(torch.arange(6.0))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "tiny": Resettable}


def meta(name: str) -> nn.Module:
    """A model without memory."""
    with torch.device("meta"):
        return MODELS[name]().train()


def batch(name: str) -> dict[str, Tensor]:
    """Ids and labels."""
    if name == "tiny":
        return models.batch()
    ids = torch.arange(24).reshape(4, 6) % 29
    return {"input_ids": ids, "labels": ids}


def initial(name: str) -> ParallelModule:
    """A module of a meta model, as it was initialised."""
    plan = models.plan(tp(), seed=SEED) if name == "tiny" else fxpar.Plan(tp=tp(), seed=SEED)
    return kept(("initial", name), lambda: fxpar.parallelize(meta(name), plan, batch(name)))


def initialise(name: str) -> Found:
    """Whole weights and buffers of a meta model that was split, its loss, and what it took."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = initial(name)
    same = torch.equal(before, torch.get_rng_state())
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    return {
        "state": model.full_state_dict(),
        "buffers": buffers,
        "loss": model.train_step(batch(name)),
        "loading": model.loading,
        "untouched": same,
    }


def save_sharded(name: str, folder: Path) -> Found:
    """Saves with torch.distributed.checkpoint; how those are placed."""
    model = initial(name)
    save({"model": model.state_dict()}, checkpoint_id=folder)
    return {n: str(getattr(value, "placements", "whole")) for n, value in model.state_dict().items()}


def load_sharded(name: str, folder: Path) -> Found:
    """Forgets the weights, loads them (the module is a `ParallelModule` by its methods), and gathers them."""
    model = initial(name)
    _forget(model)
    load({"model": model}, checkpoint_id=folder)
    return model.full_state_dict()


def _forget(model: ParallelModule) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(3.0)


def other_states(name: str) -> Found:
    """Loads a state dict that shares no memory, then ones that do not fit."""
    model = initial(name)
    wanted = model.full_state_dict()
    state = model.state_dict()
    apart = fxpar.parallelize(meta(name), model.plan.replace(seed=SEED + 1), batch(name))
    before = apart.full_state_dict()
    assert not all(torch.equal(before[n], wanted[n]) for n in wanted)
    apart.load_state_dict(state)
    loaded = apart.full_state_dict()
    _forget(apart)
    apart.load_state_dict(wanted)
    up: Any = state["up.weight"]
    other = {
        **state,
        "up.weight": Sharded(torch.zeros(12, 3), ShardSpec("down", up.shape, _by_rows(), model.world)),
    }
    some = {n: value for n, value in state.items() if n != "up.bias"} | {"extra": torch.ones(1)}
    return {
        "wanted": wanted,
        "loaded": loaded,
        "whole": apart.full_state_dict(),
        "missing": refusal(lambda: model.load_state_dict({})),
        "other": refusal(lambda: model.load_state_dict(other)),
        "tied": refusal(lambda: model.load_state_dict({**wanted, "head.weight": wanted["head.weight"] + 1})),
        "some": tuple(model.load_state_dict(some, strict=False)),
        "assign": refusal(lambda: model.load_state_dict(state, assign=True)),
        "parent": refusal(lambda: nn.Sequential(model).state_dict()),
    }


def _by_rows() -> Layout:
    return Layout.of({"tp": shard(1, 6)})


def export(name: str, folder: Path, size: int | str) -> Found:
    """Saves safetensors, counting what is alive; then refuses to do it again."""
    model = initial(name)
    with LiveBytes() as live:
        model.save_checkpoint(folder, size)
    files = sorted(file.name for file in folder.iterdir())
    largest = max(v.numel() * v.element_size() for v in model.full_state_dict().values())
    return {"files": files, "peak": live.peak, "largest": largest, "state": model.full_state_dict()}


def read_back(name: str, folder: Path) -> Found:
    """Forgets the weights and reads safetensors."""
    model = initial(name)
    _forget(model)
    model.load_checkpoint(folder)
    return model.full_state_dict()


def from_checkpoint(name: str, folder: Path, precision: str, again: Path) -> Found:
    """Splits a meta model with the weights of a checkpoint, and saves it again."""
    split = models.SPLIT if name == "tiny" and tp() > 1 else {}
    plan = fxpar.Plan(tp=tp(), split=split, precision=precision)
    model = fxpar.parallelize(meta(name), plan, batch(name), checkpoint=folder)
    model.save_checkpoint(again)
    return {"state": model.full_state_dict(), "loading": model.loading, "buffers": dict(model.named_buffers())}


def refused_checkpoints(folder: Path) -> Found:
    """What bad checkpoints are told, and whether any of it was loaded."""
    model = initial("tiny")
    before = model.full_state_dict()
    found: Found = {
        file.stem: refusal(lambda file=file: model.load_checkpoint(file))  # type: ignore[misc]
        for file in sorted(folder.glob("*.safetensors"))
    }
    after = model.full_state_dict()
    found["unchanged"] = all(torch.equal(before[n], after[n]) for n in before)
    return found
