"""What scripts try with a module that looks like one of one process: logging, losses of their own, other settings.

Every function runs alike in a rank and in the test's own process; see `jobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.runtime import models
from tests.runtime.jobs import Found, gradients, refusal, tiny_module


def trained() -> tuple[Any, dict[str, Any]]:
    """A tiny module with gradients, and its parameters that have one."""
    model = tiny_module()
    model.zero_grad()
    model.train_step(models.batch())
    return model, {name: p for name, p in model.named_parameters() if name != "unused"}


@torch.no_grad()
def orders() -> Found:
    """What ranks are told that ask for things of different tensors, or some of them for nothing."""
    with torch.enable_grad():
        _, owned = trained()
    one, other = ("up.weight", "down.weight") if dist.get_rank() == 0 else ("down.weight", "up.weight")
    return {
        "norm": refusal(lambda: owned[one].grad.norm()),
        "sum": refusal(lambda: owned[one].sum()),
        "whole": refusal(lambda: owned[other].full_tensor()),
        "not all": refusal(lambda: owned[one].norm() if dist.get_rank() == 0 else clip_grad_norm_(owned.values(), 1.0)),
        "after": owned["up.weight"].norm().item(),
    }


def joined() -> dict[str, Tensor]:
    """Gradients of the model's loss together with terms made of its logits, which are cut."""
    model = tiny_module()
    found: dict[str, Tensor] = {}
    terms: dict[str, Callable[[Any], Any]] = {
        "squares": lambda out: out["loss"] + 0.1 * out["logits"].square().mean(),
        "divided in place": lambda out: out["loss"].div_(4),
        "sum": lambda out: 2 * out["loss"] + 0.01 * out["logits"].sum(),
    }
    for name, term in terms.items():
        model.zero_grad()
        model.step = 0
        term(model(**models.batch())).backward()
        found.update({f"{name} {n}": g for n, g in gradients(model).items()})
    return found


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def settings() -> Found:
    """What changes of a module are told that its programs would not see; and those that are fine."""
    model: Any = tiny_module()
    found: Found = {
        "setting": refusal(_set(model.drop, "p", 0.5)),
        "module": refusal(_set(model, "drop", nn.Identity())),
        "number": refusal(_set(model.norm, "eps", 1.0)),
        "shared memory": refusal(lambda: model.up.weight.share_memory_()),
    }
    model.drop.p = 0.1  # as it is
    model.note = "a word of the script's own"
    found["note"] = model.note
    return found


def by_hand() -> dict[str, Tensor]:
    """Weights after steps of plain gradient descent, by `data` and by `add_`; and how many weights there are."""
    model, owned = trained()
    before = model.full_state_dict()
    for parameter in owned.values():
        parameter.data -= 0.1 * parameter.grad
    for parameter in owned.values():
        parameter.data = parameter.data.add_(parameter.grad, alpha=-0.1)
    after = {name: value.clone() for name, value in model.full_state_dict().items()}
    model.load_full_state_dict(before)
    return {**after, "count": torch.tensor(len({p.data_ptr() for p in owned.values()}))}
