"""Trainings that are run with and without graphs, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, nn

import fxpar
from fxpar.runtime.prefetch import poison
from fxpar.runtime.sharded import local_of
from tests.passes.experts import WIDTH, Routed

VOCABULARY = 256


def gpt2(size: int = 32, layers: int = 1) -> nn.Module:
    """With dropout everywhere."""
    options: dict[str, Any] = {"n_layer": layers, "n_embd": size, "n_head": 4, "n_positions": 64}
    options |= {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def llama(size: int = 32, layers: int = 1) -> nn.Module:
    """With dropout of attention."""
    options: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": size, "intermediate_size": 48}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    options |= {"use_cache": False, "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def mixtral(size: int = 32, layers: int = 1) -> nn.Module:
    """With experts, their load in the loss, and dropout of attention."""
    options: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": size, "intermediate_size": 48}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    options |= {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    options |= {"use_cache": False, "attention_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


class SmallExperts(Routed):
    """One layer of experts with dropout between words and a head: what is traced in little time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.router.weight.mul_(8.0)  # loads are uneven, and differ from step to step

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(input_ids, labels)}


def _lead(embedded: Tensor, gate: Tensor, by: float) -> None:
    """Sends tokens of the vocabulary's first half to the two experts of one rank of two, the others to the rest."""
    with torch.no_grad():
        direction = embedded[0].sign()
        embedded.view(2, -1, len(direction))[0] += by * direction
        embedded.view(2, -1, len(direction))[1] -= by * direction
        gate[:2] += by * direction
        gate[2:] -= by * direction


def mixtral_with_hot_experts() -> nn.Module:
    model: Any = mixtral()
    _lead(model.model.embed_tokens.weight, model.model.layers[0].mlp.gate.weight, 0.1)
    return model  # type: ignore[no-any-return]


def small_with_hot_experts() -> nn.Module:
    model = SmallExperts()
    _lead(model.words.weight, model.router.weight, 2.0)
    return model


def deepseek_v3(size: int = 32, layers: int = 2) -> nn.Module:
    """With a dense layer, layers of experts with a shared one, two experts without tokens, and dropout of attention."""
    options: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": size, "intermediate_size": 48}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    options |= {"first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4}
    options |= {"topk_group": 2, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16}
    options |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "attention_dropout": 0.1}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options, use_cache=False))
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[[0, 4]] = -100.0
    return model


two_layers = partial(gpt2, layers=2)


class Bag(nn.Module):
    """Words, dropout and a head: what of a training is compiled in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(VOCABULARY, 16), nn.Dropout(0.1), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.drop(torch.tanh(self.words(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Reading(nn.Module):
    """Three layers, the second of which reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)]) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.ModuleList)
            up, down = layer
            y = down(torch.relu(up(x)))
            x = x + (y / y.detach().abs().max().item() if i == 1 else y)
        return {"loss": x.square().mean()}


def reusing(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches, all in the memory of one, pinned where there is a GPU; there is nothing in it at the end."""
    memory: Any = None
    for batch in batches:
        if memory is None:
            new = partial(torch.empty_like, pin_memory=torch.cuda.is_available())
            memory = pytree.tree_map_only(Tensor, new, batch)
        for own, value in zip(pytree.tree_leaves(memory), pytree.tree_leaves(batch), strict=True):
            own.copy_(value)
        yield memory
    for own in pytree.tree_leaves(memory):
        poison(own)


def prefetched(batches: list[Any], model: fxpar.ParallelModule) -> Iterator[Any]:
    """Batches of a source that uses its memory again; those that were trained on are overwritten."""
    for batch in fxpar.prefetch(reusing(batches), model):
        yield batch
        for value in pytree.tree_leaves(batch):
            poison(value)


def words(count: int, micro: int = 1, rows: int = 2, length: int = 8, seed: int = 1) -> list[Any]:
    """Batches of tokens, or lists of so many microbatches."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for _ in range(count):
        ids = [torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(micro)]
        parts = [{"input_ids": each, "labels": each} for each in ids]
        found.append(parts if micro > 1 else parts[0])
    return found


@dataclass
class Trained:
    """What a training leaves.

    Attributes:
        losses: of each step, then of evaluations.
        weights: at the end.
        figures: of its graphs.
    """

    losses: list[float]
    weights: list[Tensor] = field(repr=False)
    figures: Any = None

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trained)
        same = all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))
        return self.losses == other.losses and same


def train(
    build: Callable[[], nn.Module],
    batches: Iterable[Any],
    impl: str = "none",
    *,
    plain: bool = False,
    set_to_none: bool = True,
    every: int = 1,
    evaluate: int = 3,
    inside: bool = False,
    scope: tuple[str, ...] = (),
    touch: Callable[[fxpar.ParallelModule, int], None] | None = None,
    feed: Callable[[list[Any], fxpar.ParallelModule], Iterable[Any]] | None = None,
    **plan: Any,
) -> Trained:
    """Trains a model with AdamW under a cosine.

    Args:
        plain: differentiates the loss of plain calls.
        every: steps of which gradients are added up.
        evaluate: calls in evaluation mode at the end.
        inside: passes the optimizer to `train_step`, in the last of `every` steps.
        touch: is called before each step.
        feed: gives the batches to the steps.
    """
    batches = list(batches)
    torch.manual_seed(0)
    graphs = fxpar.CudaGraphs(impl, scope=scope)
    first = batches[0][0] if isinstance(batches[0], list) else batches[0]
    model = fxpar.parallelize(build().train(), fxpar.Plan(cuda_graphs=graphs, **plan), first)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, fused=inside, capturable=inside and torch.cuda.is_available()
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])
    losses: list[Tensor] = []
    for i, batch in enumerate(batches if feed is None else feed(batches, model)):
        if touch is not None:
            touch(model, i)
        if inside and (i + 1) % every == 0:
            losses.append(model.train_step(batch, optimizer=optimizer, max_norm=1.0))
        elif plain:
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.detach())
        else:
            losses.append(model.train_step(batch))
        if not inside and (i + 1) % every == 0:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        scheduler.step()
    model.eval()
    with torch.no_grad():
        for batch in batches[:evaluate]:
            losses.append(model(**(batch[0] if isinstance(batch, list) else batch))["loss"])
    weights = [local_of(p).detach().cpu().clone() for p in model.parameters()]
    figures = model.graph_figures
    model.close()
    return Trained([float(each) for each in losses], weights, figures)


@cache
def as_it_is(build: Callable[[], nn.Module], steps: int, micro: int = 1, **more: Any) -> Trained:
    """Trains without graphs on batches of words, once for the same arguments."""
    return train(build, words(steps, micro), **more)


def equal_on_ranks(name: str, impl: str, plan: dict[str, Any], micro: int) -> tuple[bool, Any]:
    """On each rank: whether a training with graphs is the one without, and what graphs there were."""
    builds: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "bag": Bag}
    build = builds[name]
    plain = as_it_is(build, 6, micro, **plan)
    graphed = train(build, words(6, micro), impl, **plan)
    return plain == graphed, graphed.figures


def equal_where_rows_are_counted(
    build: Callable[[], nn.Module], plan: dict[str, Any], micro: int, rows: int, length: int
) -> tuple[bool, Any, list[float]]:
    """On each rank: whether a training of dropless experts with partial graphs is the one without, its figures, and
    the losses. Each rank has its tokens, so that rows differ from rank to rank and from step to step.

    Scopes cut what is compiled otherwise: losses then differ by rounding.
    """
    batches = words(6, micro, rows, length, seed=dist.get_rank() + 1)
    plan = {"dp": 2, "ep": 2, "experts": fxpar.Experts("dropless"), **plan}
    scope = plan.pop("scope", ())
    plain, graphed = train(build, batches, **plan), train(build, batches, "partial", scope=scope, **plan)
    if scope and plan.get("compile"):
        pairs = zip(plain.losses, graphed.losses, strict=True)
        return all(abs(a - b) < 1e-5 * abs(a) for a, b in pairs), graphed.figures, plain.losses
    return plain == graphed, graphed.figures, plain.losses


def equal_with_replicas(build: Callable[[], nn.Module], impl: str, plan: dict[str, Any]) -> tuple[bool, Any, list[Any]]:
    """On each rank: whether a training with replicas of hot experts and graphs is the one without graphs, its
    figures, and the loads of its steps but the last. The experts of one rank are hot in even steps, of the other in
    odd ones, so that replays need other weights in the slots than the step that was recorded.
    """
    batches = words(7, 2, rows=3, length=7, seed=dist.get_rank() + 1)
    for i, parts in enumerate(batches):
        for part in parts:
            ids = part["input_ids"]
            ids[:2] = ids[:2] % (VOCABULARY // 2) + i % 2 * (VOCABULARY // 2)
    loads: list[Any] = []

    def note(model: fxpar.ParallelModule, step: int) -> None:
        if step:
            loads.extend(model.report().loads)

    plan = {"dp": 2, "ep": 2, **plan}
    plain = train(build, batches, **plan)
    graphed = train(build, batches, impl, touch=note, **plan)
    return plain == graphed, graphed.figures, loads
