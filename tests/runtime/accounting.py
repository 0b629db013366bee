"""What a real step sends, keeps and holds, counted by its own means, beside the report of the same module."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.cost.communication import collectives
from fxpar.runtime.sharded import local_of
from fxpar.runtime.steps import FinishedForward
from tests.runtime import chosen
from tests.runtime.jobs import Found, case_module, kept, tp
from tests.zoo import CASES

_OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Counting(TorchDispatchMode):
    """Collectives by direction, name and bytes, and the most bytes that are alive besides `own` storages."""

    def __init__(self, own: Mapping[int, Any], watched: Watched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.watched, self.alive = own, watched, dict[int, tuple[Any, int]]()
        self.sent: Counter[tuple[str, str, int]] = Counter()
        self.live = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "_c10d_functional::wait_tensor":
            time.sleep(0.01)  # gloo's thread lets go of a finished collective's tensors a moment later
        if name.startswith("_c10d_functional::") and name.partition("::")[2] in _OPS:
            op = _OPS[name.partition("::")[2]]
            size = out.nbytes if op == "all_gather" else args[0].nbytes * (tp() if op == "all_to_all" else 1)
            self.sent["backward" if self.watched.is_backward else "forward", op, size] += 1
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.enter(leaf.untyped_storage())
        return out

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it dies."""
        key = storage._cdata
        if key in self.own or key in self.alive:
            return

        def leave(_: Any) -> None:
            self.live -= self.alive.pop(key)[1]

        self.alive[key] = weakref.ref(storage, leave), storage.nbytes()
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)


class Watched:
    """What stands between the forward of a step and its backward, and when that runs."""

    def __init__(self, own: Mapping[int, Any]) -> None:
        self.own, self.bytes, self.is_backward = own, -1, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watched]:
        """Watches the steps that run meanwhile."""
        plain: Any = FinishedForward.backward

        def backward(pending: FinishedForward, tangents: Any, *, whole: bool, **more: Any) -> Any:
            parts = pending.step.whole_backward if whole else pending.step.backward
            names = {name for part in parts for name in part.takes}
            values = [pending.saved[name] for name in names if name in pending.saved]
            kept = {v.untyped_storage()._cdata: v.untyped_storage() for v in values if isinstance(v, Tensor)}
            self.bytes = sum(storage.nbytes() for key, storage in kept.items() if key not in self.own)
            del values, kept
            self.is_backward = True
            try:
                return plain(pending, tangents, whole=whole, **more)
            finally:
                self.is_backward = False

        changed: Any = FinishedForward
        changed.backward = backward
        try:
            yield self
        finally:
            changed.backward = plain


def step(model: fxpar.ParallelModule, batch: Any) -> Found:
    """One step of training, counted; then AdamW's state."""
    held = [local_of(value) for value in (*model.parameters(), *model.buffers())]
    indices = [t for compiled in model._programs for t in compiled.indices]
    model.train_step(batch)  # copies of main values are made
    copies = list(model._runner.copies._copies.values()) if model._runner.copies is not None else []
    model.zero_grad()
    tensors = [*held, *copies, *pytree.tree_leaves(batch), *indices]
    own = {t.untyped_storage()._cdata: t for t in tensors}
    with Watched(own)() as watched, Counting(own, watched) as counting:
        model.train_step(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "sent": counting.sent,
        "peak": counting.most,
        "activations": watched.bytes,
        "parameters": sum(local_of(p).nbytes for p in model.parameters()),
        "copies": sum(copy.nbytes for copy in copies),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(local_of(p.grad).nbytes for p in model.parameters() if p.grad is not None),
        "optimizer": sum(local_of(value).nbytes for value in states),
    }


def account(name: str, how: str = "lines") -> Found:
    """A step of a case and, from rank 0, its report and the program's collectives.

    Args:
        how: the case's lines, these in mixed precision, a chosen plan with sequence parallelism, or with checkpointed
            layers.
    """
    case = CASES[name]

    def checkpointed() -> fxpar.ParallelModule:
        model: Any = case.model()
        model.gradient_checkpointing_enable()
        return fxpar.parallelize(model, case.plan(tp()), case.example(), case.loss)

    def mixed() -> fxpar.ParallelModule:
        plan = case.plan(tp()).replace(precision="bf16")
        return fxpar.parallelize(case.model(), plan, case.example(), case.loss)

    if how in ("checkpointed", "mixed"):
        model = kept((how, name), checkpointed if how == "checkpointed" else mixed)
    else:
        model = chosen.module(name, sequence_parallel=True) if how == "sequence" else case_module(name)
    found = step(model, case.example())
    if dist.get_rank() == 0:
        found["report"] = model.report().to_dict()
        found["listed"] = Counter((c.phase, c.op, c.bytes) for c in collectives(model.program))
    return found
