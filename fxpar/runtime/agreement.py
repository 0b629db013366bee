"""What the ranks of one module agree on, and what they tell each other when one of them fails.

Enters: a rank's facts (texts by name), or the error that ends it. Leaves: nothing where all ranks say the same, else an
error that names the ranks and the reason.

Ranks meet in the key-value store of the process group and not in a collective: there a rank that is missing has a
name, waiting has a limit whatever the backend, and a rank that fails leaves its reason behind for the others. Only
compilations meet. A call whose program is there counts itself and sends nothing here (batches: `inputs.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from fxpar.errors import FxparError, InputError, RankError
from fxpar.plan.plan import Plan
from fxpar.runtime.tracing import refuse_tracing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Seconds in which ranks that fail find each other; who is not there by then is named.
_ROLL_CALL = 2.0
_LONGEST_POLL = 0.25
_LONGEST_REASON = 2000
# Texts up to this length are shown side by side; longer ones, digests among them, say nothing to a reader.
_LONGEST_FACT = 60


# Under which a rank tells its party.
_PARTY = "party"


@dataclass
class Agreement:
    """One module's place in the store.

    Attributes:
        rank: of all processes.
        size: number of processes; one agrees with itself.
        seconds: how long ranks wait for each other.
        module: number of the module among those that this process has made.
        calls: calls so far that all ranks make. The first, 0, is `parallelize`.
        points: agreements so far in this call.
        what: the call that is under way.
    """

    rank: int
    size: int
    seconds: float
    module: int = 0
    calls: int = -1
    points: int = 0
    what: str = ""

    # ------------------------------------------------------------------ calls

    def call(self, what: str) -> _Call:
        """A context for one call that every rank makes; an error that leaves it is told to the others."""
        return _Call(self, what)

    def begin(self, what: str) -> None:
        """Counts a call."""
        self.calls, self.points, self.what = self.calls + 1, 0, what

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks why this one stops.

        Raises:
            RankError: the error is that of a collective whose partner is gone; says which, and why if it said so.
        """
        store, was_lost = self._store(), is_lost(error)
        if self.size == 1 or store is None or isinstance(error, RankError):
            return
        try:
            signs = self._signs(store, error) if was_lost else self._explain(store, error)
        except dist.DistError:
            signs = f"{_first_line(error)}; the store is gone too, and so the process that kept it, most often rank 0"
        if was_lost:
            raise RankError(
                f"a collective failed: {signs}",
                where=f"rank {self.rank}, {self.what}",
                remedy="look at the output of the ranks that are named",
            ) from error

    def _explain(self, store: Store, error: BaseException) -> str:
        self._tell(store, self._failure(error))
        self._stay(store, self._point)
        return ""

    def _stay(self, store: Store, point: str) -> None:
        """Waits a moment for the others to read why: the store may end with this process."""
        store.add(f"{point}/read", 1)
        _poll(lambda: store.add(f"{point}/read", 0) >= self.size, _ROLL_CALL)

    def _signs(self, store: Store, error: BaseException) -> str:
        """What the other ranks have said about this call."""
        point = self._point
        others = [rank for rank in range(self.size) if rank != self.rank]
        said = self._tell(store, self._failure(error))
        store.set(f"{point}/lost/{self.rank}", "")
        _poll(lambda: store.check([f"{point}/lost/{rank}" for rank in others]), _ROLL_CALL)
        found = [_first_line(error)]
        if said.get("kind") == "failed" and said["rank"] != self.rank:
            found.append(f"{said['where']}: {said['reason']}")
        compiling = [rank for rank in others if store.check([f"{point}/{rank}"])] if not self.points else []
        for rank in compiling:
            facts = _brief(json.loads(store.get(f"{point}/{rank}")))
            found.append(f"rank {rank} compiled a program ({facts}) where this rank had one: their calls differ")
        known = {*compiling, said.get("rank"), *(r for r in others if store.check([f"{point}/lost/{r}"]))}
        silent = [rank for rank in others if rank not in known]
        if silent:
            found.append(f"{_ranks(silent)} gave no sign: ended, or busy with something else")
        return "; ".join(found)

    # ------------------------------------------------------------------ agreements

    def agree(self, facts: Mapping[str, str], remedy: str, party: str = "") -> None:
        """Compares facts by name over all ranks; all of them must call it at the same place.

        The rank that comes last compares; its verdict, or the first failure, is what every rank reads.

        Args:
            party: ranks are compared with those of the same party alone.

        Raises:
            InputError: a rank has another text; names the first that differs, and the ranks.
            RankError: a rank failed before it got here, or did not come in time.
        """
        if self.size == 1:
            return
        store, point = self._store(), self._point
        if store is None:
            raise RankError("the process group is gone", where=self.what, remedy="destroy it after the last call")
        try:
            verdict = self._verdict(store, point, {_PARTY: party, **facts} if party else facts, remedy)
        except dist.DistError as error:
            raise _unreachable(error, f"rank {self.rank}, {self.what}") from error
        self.points += 1
        if verdict:
            kind = InputError if verdict["kind"] == "differs" else RankError
            raise kind(verdict["reason"], where=verdict["where"], remedy=verdict["remedy"])

    def told(self, what: str, text: str) -> list[str]:
        """What each rank tells, in their order; all of them must call it at the same place."""
        store = self._store()
        if self.size == 1 or store is None:
            return [text]
        keys = [f"fxpar/{self.module}/told/{what}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        self.agree({}, "")
        return [told.decode() for told in store.multi_get(keys)]

    def post(self, calls: int, look: int) -> None:
        """Leaves a sign that this rank goes on, for those that wait for it (`fxpar.exchange.watch`)."""
        store = self._store()
        if store is not None:
            with contextlib.suppress(dist.DistError):  # who reads finds no sign then
                store.set(self._sign(self.rank), f"{calls} {look}")

    def posted(self) -> list[tuple[int, int] | None]:
        """The signs of all ranks, in order: None of one that left none, and of all where the store is gone."""
        store = self._store()
        found: list[tuple[int, int] | None] = [None] * self.size
        if store is not None:
            with contextlib.suppress(dist.DistError):
                for rank in range(self.size):
                    if store.check([self._sign(rank)]):
                        calls, look = store.get(self._sign(rank)).split()
                        found[rank] = int(calls), int(look)
        return found

    def _sign(self, rank: int) -> str:
        return f"fxpar/{self.module}/sign/{rank}"

    def _verdict(self, store: Store, point: str, facts: Mapping[str, str], remedy: str) -> dict[str, Any]:
        store.set(f"{point}/{self.rank}", json.dumps(dict(facts)))
        if store.add(f"{point}/count", 1) == self.size:
            self._tell(store, self._compared(store, point, remedy))
        if not _poll(lambda: store.check([f"{point}/verdict"]), self.seconds):
            self._tell(store, self._absent(store, point, facts))
        verdict: dict[str, Any] = json.loads(store.get(f"{point}/verdict"))
        rank = verdict.get("rank", self.rank)
        if verdict.get("kind") in ("failed", "lost") and self.calls and facts and not store.check([f"{point}/{rank}"]):
            verdict["reason"] += f"; this rank had compiled a program ({_brief(facts)})"
        if verdict:
            self._stay(store, point)
        return verdict

    def _compared(self, store: Store, point: str, remedy: str) -> dict[str, Any]:
        texts = store.multi_get([f"{point}/{rank}" for rank in range(self.size)])
        told = [json.loads(text) for text in texts]
        for name in dict.fromkeys(name for found in told for name in found if name != _PARTY):
            for party in dict.fromkeys(found.get(_PARTY) for found in told):
                first, *rest = (rank for rank, found in enumerate(told) if found.get(_PARTY) == party)
                odd = [rank for rank in rest if told[rank].get(name) != told[first].get(name)]
                if odd:
                    here, there = _shown(told[first].get(name)), _shown(told[odd[0]].get(name))
                    reason = f"differs between rank {first}{here} and {_ranks(odd)}{there}"
                    return {"kind": "differs", "where": name, "reason": reason, "remedy": remedy}
        return {}

    def _absent(self, store: Store, point: str, facts: Mapping[str, str]) -> dict[str, Any]:
        missing = [rank for rank in range(self.size) if not store.check([f"{point}/{rank}"])]
        program = f" to agree on a program ({_brief(facts)})" if _brief(facts) else ""
        return {
            "kind": "absent",
            "rank": self.rank,
            "where": self.what,
            "reason": f"{_ranks(missing)} did not come within {self.seconds:g} s{program}",
            "remedy": "every rank must make the same calls with equal batches; "
            "look at the output of the ranks that are named, or raise parallelize(timeout=…)",
        }

    # ------------------------------------------------------------------ the store

    @property
    def _point(self) -> str:
        return f"fxpar/{self.module}/{self.calls}/{self.points}"

    def _store(self) -> Store | None:
        """Not kept, as the groups are not: it must not outlive the process's exit handlers."""
        return None if dist.group.WORLD is None else dist.group.WORLD.get_group_store()

    def _tell(self, store: Store, verdict: dict[str, Any]) -> dict[str, Any]:
        """Sets the verdict of this point where there is none; returns the one that stands."""
        stands: dict[str, Any] = json.loads(store.compare_set(f"{self._point}/verdict", "", json.dumps(verdict)))
        return stands

    def _failure(self, error: BaseException) -> dict[str, Any]:
        was_lost = is_lost(error)
        text = str(error) if isinstance(error, FxparError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FxparError):
            text = text.removeprefix(f"{self.what}: ")  # the place is said
        text = f"a collective failed: {_first_line(error)}" if was_lost else text
        return {
            "kind": "lost" if was_lost else "failed",  # a loss has its cause elsewhere: others do not repeat it
            "rank": self.rank,
            "where": f"rank {self.rank}",
            "reason": f"failed in {self.what}: {text[:_LONGEST_REASON]}",
            "remedy": "its own output says more",
        }


def connected(seconds: float) -> Agreement:
    """The agreement of the next module on the processes that are there.

    Raises:
        RankError: the process that keeps the group's store has ended.
    """
    if dist.group.WORLD is None:
        return Agreement(0, 1, seconds)
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        module = dist.group.WORLD.get_group_store().add(f"fxpar/modules/{rank}", 1) if size > 1 else 0
    except dist.DistError as error:
        raise _unreachable(error, f"rank {rank}, start-up") from error
    return Agreement(rank, size, seconds, module)


def plan_facts(plan: Plan) -> dict[str, str]:
    """What a plan asks for, by option, and the version of torch that carries it out."""
    options = {field.name: getattr(plan, field.name) for field in fields(plan)}
    texts = {f"plan {n}": str(dict(what) if isinstance(what, Mapping) else what) for n, what in options.items()}
    return {"torch's version": torch.__version__, **texts}


def together(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Marks a method of `ParallelModule` that all ranks call: what ends it on one is told to the others."""

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        refuse_tracing()
        with self.world.agreement.call(method.__name__):
            return method(self, *args, **kwargs)

    return call


class _Call:
    def __init__(self, agreement: Agreement, what: str) -> None:
        self._agreement, self._what, self._around = agreement, what, ""

    def __enter__(self) -> None:
        self._around = self._agreement.what
        self._agreement.begin(self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._agreement.failed(error)
        self._agreement.what = self._around  # of the call that this one is part of


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: gloo's errors have no type, but name its source files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _unreachable(error: BaseException, where: str) -> RankError:
    return RankError(
        f"the process group's store does not answer: {_first_line(error)}",
        where=where,
        remedy="look at the output of the process that keeps it, most often rank 0",
    )


def _poll(is_done: Callable[[], bool], seconds: float) -> bool:
    """Asks until it is so or the time is over. A store's own wait can differ by backend and logs every time-out."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)
    return True


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (" …" if len(ranks) > 8 else "")


def _shown(text: str | None) -> str:
    if text is None:
        return " (which has none)"
    return f" ({text})" if len(text) <= _LONGEST_FACT else ""


def _brief(facts: Mapping[str, str]) -> str:
    """Which call a program is for."""
    shown = [f"{name}: {text}" for name, text in facts.items() if name.startswith(("the call", "the mode", "batch "))]
    return ", ".join(shown)[:_LONGEST_REASON]


def _first_line(error: BaseException) -> str:
    """The error in short: without gloo's source file before it and its advice behind it."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S*/gloo/\S*\] ", "gloo: ", line).split(". This is")[0]
