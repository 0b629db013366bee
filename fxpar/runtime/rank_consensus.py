"""What the ranks of one module agree on, and what they tell each other when one of them fails.

Enters: a rank's facts (texts by name), or the error that ends it. Leaves: nothing where all ranks say the same, else an
error that names the ranks and the reason.

Compilations meet in the key-value store of the process group and not in a collective: there a rank that is missing has
a name, waiting has a limit whatever the backend, and a rank that fails leaves its reason behind for the others.

A call whose program is there meets once, in front of its first collective: a few words over a group of the hosts
(`Meeting`), together with what `rank_batches.py` compares. A rank that has failed by then says so in its place, and all
raise its error; nothing is under way, and the next call works. An error after that leaves ranks at different points,
which nothing brings together again: it goes to all of them by the alarm (`alarm.py`), and further calls are refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

import fxpar.errors as errors
from fxpar.errors import FxparError, InputError, RankError
from fxpar.plan.plan import GROUPS, Plan
from fxpar.runtime.alarm import Alarm, Failed, Meeting, Met, alarm_of, number, poll, refuse_tracing, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Seconds in which ranks that fail find each other; who is not there by then is named.
_ROLL_CALL = 2.0
# Seconds in which the others come to where a rank says that saving or loading failed there.
_PATIENCE = 8.0
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
        meeting: where the hosts meet; None until there are groups.
        step: the number of the next step that draws, which all ranks must have alike.
        stepping: class of the optimizer whose step has begun on this rank and has not ended; empty without one.
        leaves_work: whether calls end while a device still computes.
        alarm: the error that ended the module, if one did.
    """

    rank: int
    size: int
    seconds: float
    module: int = 0
    calls: int = -1
    points: int = 0
    what: str = ""
    meeting: Meeting | None = None
    step: Callable[[], int] = lambda: 0
    stepping: str = ""
    leaves_work: bool = False
    alarm: Alarm = field(default_factory=Alarm)
    # Whether collectives may be under way, so that ranks that fail are not at one point.
    _entered: bool = False
    _meetings: int = 0
    # Of this call: whether ranks met at its begin, whether another rank told its error, and what all raise together.
    _is_at_once: bool = False
    _is_told: bool = False
    _raised: BaseException | None = None

    # ------------------------------------------------------------------ calls

    def call(self, what: str, at_once: bool = False) -> _CollectiveCall:
        """Returns a context for one call that every rank makes; an error that leaves it is told to the others.

        Args:
            at_once: whether ranks meet at its begin, where it has no other place for that.
        """
        return _CollectiveCall(self, what, at_once)

    def begin(self, what: str) -> None:
        """Counts a call."""
        self.calls, self.points, self.what = self.calls + 1, 0, what
        self._entered, self._is_told, self._raised = False, False, None

    def check_steps(self) -> None:
        """Refuses a call after an optimizer's step that an error ended, and somebody caught.

        Raises:
            InputError: there was one. Where it was not on all ranks, no call can be made any more.
        """
        if self.stepping and self.size > 1:
            name, self.stepping = self.stepping, ""
            self._entered = True  # the ranks stand at different points as after a collective
            raise InputError(
                f"a step of {name} was broken off, so that parameters of this rank may be of another step than those "
                "of others",
                where="the optimizer",
                remedy="let an error of optimizer.step() end the training, and resume from the last save",
            )

    def enter(self, place: str = "its program") -> None:
        """Goes on to what communicates, when all ranks have come so far; within a call they meet once.

        Raises:
            FxparError: a rank failed before it came here: its error, on all ranks.
            InputError: ranks make different calls.
        """
        if not self._entered:
            self.meet(place)
            self._entered = True

    def enter_with(self, number: int) -> int:
        """Goes on as `enter`; returns the smallest number with which a rank does."""
        met, self._entered = self.meet("its graph", [number]), True
        return number if met is None else met.smallest[0]

    def meet(self, place: str, compared: Sequence[int] = (), more: str = "") -> Met | None:
        """Meets the other ranks; None where there are none, or no groups yet. Raises as `enter`.

        Args:
            place: what for, which is the same on all ranks.
            compared: of which all get the largest and the smallest.
            more: what to say of this rank where others come for something else.
        """
        if self.meeting is None or self.calls < 1:
            return None
        met = self._met(place, compared)
        if met.failed is not None:
            raise self._shared(met)
        if met.differs or met.steps_differ:
            self._differ(f"{self.what}, {place}{more}" if met.differs else f"step {self.step()}")
        return met

    def _met(
        self, place: str, compared: Sequence[int] = (), failed: Failed = Failed.NOT, seconds: float | None = None
    ) -> Met:
        assert self.meeting is not None
        step = self.step()
        # A step that a user set to something else is refused later, with a better text than an overflow here.
        step = step if type(step) is int and 0 <= step < 2**62 else -1
        met = self.meeting.meet((failed, self.calls, self.points, step), (self.what, place), compared, seconds)
        self._entered, self._meetings = False, self._meetings + 1
        self.calls, self.points = met.calls, met.points
        return met

    def _differ(self, text: str) -> None:
        """Raises what all ranks came for."""
        self.points += 1
        texts = self.gather_texts(f"at {self._meetings}", text)
        ranks: dict[str, list[int]] = {}
        for rank, statement in enumerate(texts):
            ranks.setdefault(statement, []).append(rank)
        raise InputError(
            f"differs: {'; '.join(f'{_ranks(members)}: {statement}' for statement, members in ranks.items())}",
            where="the call",
            remedy="make the same calls on all ranks, with batches of the same structure and sizes",
        )

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks why this one stops.

        Raises:
            FxparError: all ranks raise this one, the error of the first of them; or the error is that of a collective
                whose partner is gone: says which, and why if it said so.
        """
        store = self._store()
        # What a stopped module raises here is a consequence: its connections were cut. The first error is the cause.
        if self.alarm.first is not None and isinstance(error, Exception):
            raise self.alarm.error from error
        if self.size == 1:
            return
        if store is None or error is self._raised:
            return
        if self.meeting is None or self.calls < 1:
            self._fails_to_compile(store, error)
        elif is_lost(error):
            self._lost(store, error)
        elif isinstance(error, Exception) and self._may_be_shared(error):
            self._share(store, error)
        else:
            self._ends(store, error)

    def _fails_to_compile(self, store: Store, error: BaseException) -> None:
        """Tells what went wrong in `parallelize`, where there is nothing yet that could be called again."""
        if isinstance(error, RankError):
            return
        was_lost = is_lost(error)
        try:
            signs = self._signs(store, error) if was_lost else self._explain(store, error)
        except dist.DistError:
            signs = _without_store(error)
        if was_lost:
            raise RankError(
                f"a collective failed: {signs}",
                where=f"rank {self.rank}, {self.what}",
                remedy="look at the output of the ranks that are named",
            ) from error

    def _lost(self, store: Store, error: BaseException) -> None:
        """Raises the error of the rank that is why a collective failed: it has said so, or has ended."""
        self.alarm.hang_up()  # who waits for this rank waits for nothing
        try:
            if not wait_for(self.alarm, store, _ROLL_CALL / 2):
                reason = f"a collective failed: {self._signs(store, error)}"
                self.alarm.tell(store, f"rank {self.rank}, {self.what}", reason)
        except dist.DistError:
            self.alarm.tell(None, f"rank {self.rank}, {self.what}", f"a collective failed: {_without_store(error)}")
        raise self.alarm.error from error

    def _ends(self, store: Store, error: BaseException) -> None:
        """Ends the module, whose ranks are at different points or about to be: no call can be made any more."""
        with contextlib.suppress(dist.DistError):
            self._tell(store, self._failure(error))  # for ranks that agree on a program
        self.alarm.tell(store, f"rank {self.rank}, {self.what}", f"an earlier call failed: {self._text(error)}")

    def stop(self, error: RankError) -> None:
        """Ends all calls of the module on all ranks, on any thread."""
        self.alarm.tell(self._store(), error.where, error.reason)

    def _may_be_shared(self, error: Exception) -> bool:
        """Returns whether the other ranks come to where this one says its error; not who did not come to an
        agreement."""
        is_alone = isinstance(error, RankError) and not self._is_told
        return not is_alone and (isinstance(error, FxparError) or not self._entered)

    def _share(self, store: Store, error: Exception) -> None:
        """Meets all ranks, which raise the first one's error.

        In front of the collectives of a call nothing is under way. After the first of them an error of fxpar may be
        that of all ranks, who come with the same words then; else the others are somewhere else, and wait for this one.
        """
        failed = Failed.LATE if self._entered else Failed.NOT if self._is_told else Failed.EARLY
        seconds = _PATIENCE if self._entered or self._is_at_once else None
        record = json.dumps(self._record(error))
        words = [number(self._text(error))] if failed is Failed.LATE else []
        try:
            if failed is Failed.EARLY:
                self._tell(store, self._failure(error))
                store.add(f"{self._point}/read", 1)  # those who read it wait for this rank no longer
            store.set(self._place_of(self._meetings, self.rank), record)
            met = self._met("", words, failed, seconds)
        except RuntimeError as lost:
            if not is_lost(lost):
                raise
            if seconds is None:
                self._lost(store, lost)
            self._ends(store, error)
            return
        if failed is Failed.LATE and not (met.all_late and met.is_equal):
            self._ends(store, error)
        elif met.failed is not None and not met.all_failed:
            raise self._shared(met) from error

    def _record(self, error: Exception) -> dict[str, str]:
        """Returns what another rank makes the same error of."""
        if not isinstance(error, FxparError):
            where, remedy = f"rank {self.rank}", "its own output says more"
            return {"kind": "RankError", "where": where, "reason": self._reason(error), "remedy": remedy}
        where = f"rank {self.rank}{error.where and ', '}{error.where}"
        return {"kind": type(error).__name__, "where": where, "reason": error.reason, "remedy": error.remedy}

    def _shared(self, met: Met) -> FxparError:
        """Returns the error with which a rank came to the last meeting."""
        store = self._store()
        assert store is not None, "ranks have met"
        if met.is_late and wait_for(self.alarm, store, _ROLL_CALL):
            return self.alarm.error
        record = json.loads(store.get(self._place_of(self._meetings - 1, met.failed or 0)))
        # Only classes of fxpar.errors travel by name: unpickling what another process wrote could run code.
        kind: type[FxparError] = getattr(errors, record["kind"], RankError)
        self._raised = kind(record["reason"], where=record["where"], remedy=record["remedy"])
        return self._raised

    def _place_of(self, meeting: int, rank: int) -> str:
        return f"fxpar/{self.module}/met/{meeting}/{rank}"

    def _explain(self, store: Store, error: BaseException) -> str:
        self._tell(store, self._failure(error))
        self._stay(store, self._point)
        return ""

    def _stay(self, store: Store, point: str) -> None:
        """Waits a moment for the others to read why: the store may end with this process."""
        store.add(f"{point}/read", 1)
        poll(lambda: store.add(f"{point}/read", 0) >= self.size, _ROLL_CALL)

    def _signs(self, store: Store, error: BaseException) -> str:
        """Returns what the other ranks have said about this call."""
        point = self._point
        others = [rank for rank in range(self.size) if rank != self.rank]
        said = self._tell(store, self._failure(error))
        store.set(f"{point}/lost/{self.rank}", "")
        poll(lambda: store.check([f"{point}/lost/{rank}" for rank in others]), _ROLL_CALL)
        signs = [_first_line(error)]
        if said.get("kind") == "failed" and said["rank"] != self.rank:
            signs.append(f"{said['where']}: {said['reason']}")
        compiling = [rank for rank in others if store.check([f"{point}/{rank}"])] if not self.points else []
        for rank in compiling:
            facts = _brief(json.loads(store.get(f"{point}/{rank}")))
            signs.append(f"rank {rank} compiled a program ({facts}) where this rank had one: their calls differ")
        known = {*compiling, said.get("rank"), *(r for r in others if store.check([f"{point}/lost/{r}"]))}
        silent = [rank for rank in others if rank not in known]
        # What ranks leave behind that end, or drop the module, without an error (`Alarm.leave`).
        marks = [f"fxpar/{self.module}/{word}/" for word in ("left", "done")]
        if gone := [rank for rank in silent if any(store.check([f"{mark}{rank}"]) for mark in marks)]:
            signs.append(f"{_ranks(gone)} ended without this call: make it on all ranks, not under `if rank == 0`")
            silent = [rank for rank in silent if rank not in gone]
        if silent:
            signs.append(f"{_ranks(silent)} gave no sign: ended, or busy with something else")
        return "; ".join(signs)

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
        self._entered = False  # all ranks are here
        if verdict:
            self._is_told = verdict["kind"] == "failed"
            kind = InputError if verdict["kind"] == "differs" else RankError
            raise kind(verdict["reason"], where=verdict["where"], remedy=verdict["remedy"])

    def gather_texts(self, what: str, text: str) -> list[str]:
        """Returns what each rank tells, in their order; all of them must call it at the same place."""
        store = self._store()
        if self.size == 1 or store is None:
            return [text]
        keys = [f"fxpar/{self.module}/texts/{what}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        self.agree({}, "")
        return [encoded.decode() for encoded in store.multi_get(keys)]

    def post(self, calls: int, look: int) -> None:
        """Leaves a sign that this rank goes on, for those that wait for its copies (`fxpar.peer_memory`)."""
        store = self._store()
        if store is not None:
            with contextlib.suppress(dist.DistError):  # who reads finds no sign then
                store.set(self._sign(self.rank), f"{calls} {look}")

    def posted(self) -> list[tuple[int, int] | None]:
        """Returns the signs of all ranks, in order: None of one that left none, and of all where the store is gone."""
        store = self._store()
        signs: list[tuple[int, int] | None] = [None] * self.size
        if store is not None:
            with contextlib.suppress(dist.DistError):
                for rank in range(self.size):
                    if store.check([self._sign(rank)]):
                        calls, look = store.get(self._sign(rank)).split()
                        signs[rank] = int(calls), int(look)
        return signs

    def _sign(self, rank: int) -> str:
        return f"fxpar/{self.module}/sign/{rank}"

    def _verdict(self, store: Store, point: str, facts: Mapping[str, str], remedy: str) -> dict[str, Any]:
        store.set(f"{point}/{self.rank}", json.dumps(dict(facts)))
        if store.add(f"{point}/count", 1) == self.size:
            self._tell(store, self._compared(store, point, remedy))
        if not poll(lambda: self.alarm.first is not None or store.check([f"{point}/verdict"]), self.seconds):
            self._tell(store, self._absent(store, point, facts))
        if not store.check([f"{point}/verdict"]):
            self.alarm.check()  # who is missing will not come
        verdict: dict[str, Any] = json.loads(store.get(f"{point}/verdict"))
        rank = verdict.get("rank", self.rank)
        if verdict.get("kind") in ("failed", "lost") and self.calls and facts and not store.check([f"{point}/{rank}"]):
            verdict["reason"] += f"; this rank had compiled a program ({_brief(facts)})"
        if verdict:
            self._stay(store, point)
        return verdict

    def _compared(self, store: Store, point: str, remedy: str) -> dict[str, Any]:
        texts = store.multi_get([f"{point}/{rank}" for rank in range(self.size)])
        facts = [json.loads(text) for text in texts]
        for name in dict.fromkeys(name for rank_facts in facts for name in rank_facts if name != _PARTY):
            for party in dict.fromkeys(rank_facts.get(_PARTY) for rank_facts in facts):
                first, *rest = (rank for rank, rank_facts in enumerate(facts) if rank_facts.get(_PARTY) == party)
                odd = [rank for rank in rest if facts[rank].get(name) != facts[first].get(name)]
                if odd:
                    here, there = _shown(facts[first].get(name)), _shown(facts[odd[0]].get(name))
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
        """Returns the store. Not kept, as the groups are not: it must not outlive the process's exit handlers."""
        return None if dist.group.WORLD is None else dist.group.WORLD.get_group_store()

    def _tell(self, store: Store, verdict: dict[str, Any]) -> dict[str, Any]:
        """Sets the verdict of this point where there is none; returns the one that stands."""
        stands: dict[str, Any] = json.loads(store.compare_set(f"{self._point}/verdict", "", json.dumps(verdict)))
        return stands

    def _failure(self, error: BaseException) -> dict[str, Any]:
        return {
            "kind": "lost" if is_lost(error) else "failed",  # a loss has its cause elsewhere: others do not repeat it
            "rank": self.rank,
            "where": f"rank {self.rank}",
            "reason": self._reason(error),
            "remedy": "its own output says more",
        }

    def _reason(self, error: BaseException) -> str:
        return f"failed in {self.what}: {self._text(error)}"

    def _text(self, error: BaseException) -> str:
        if is_lost(error):
            return f"a collective failed: {_first_line(error)}"
        text = str(error) if isinstance(error, FxparError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FxparError):
            text = text.removeprefix(f"{self.what}: ")  # the place is said
        return text[:_LONGEST_REASON]


def connected(seconds: float) -> Agreement:
    """Returns the agreement of the next module on the processes that are there.

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
    return Agreement(rank, size, seconds, module, alarm=alarm_of(module, rank, size, seconds))


def plan_facts(plan: Plan) -> dict[str, str]:
    """Returns what a plan asks for, by option, and the version of torch that carries it out."""
    options = {field.name: getattr(plan, field.name) for field in fields(plan)}
    for name in GROUPS:
        record = options.pop(name)
        options |= {f"{name}.{field.name}": getattr(record, field.name) for field in fields(record)}
    texts = {f"plan {n}": str(dict(what) if isinstance(what, Mapping) else what) for n, what in options.items()}
    return {"torch's version": torch.__version__, **texts}


def together(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Marks a method of `ParallelModule` that all ranks call, and that enters before it communicates.

    What ends it on one rank is told to the others.
    """
    return _marked(method, False)


def together_at_once(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Marks one at whose begin all ranks meet, as it communicates in many places."""
    return _marked(method, True)


def _marked(method: Callable[Concatenate[Any, _P], _R], at_once: bool) -> Callable[Concatenate[Any, _P], _R]:
    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        refuse_tracing()
        with self.world.agreement.call(method.__name__, at_once):
            self.world.agreement.check_steps()
            return method(self, *args, **kwargs)

    return call


class _CollectiveCall:
    def __init__(self, agreement: Agreement, what: str, at_once: bool) -> None:
        self._agreement, self._what, self._around, self._at_once = agreement, what, "", at_once
        self._call: tuple[str, float] | None = None

    def __enter__(self) -> None:
        agreement = self._agreement
        agreement.alarm.check()
        self._around, self._call = agreement.what, agreement.alarm.call
        agreement.alarm.call = self._what, time.monotonic()
        agreement.begin(self._what)
        agreement._is_at_once = self._at_once
        if self._at_once:
            try:
                agreement.meet("its begin")
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        agreement = self._agreement
        try:
            if error is not None:
                agreement.failed(error)
            else:
                agreement.alarm.check()  # what an aborted collective leaves is no result
        finally:
            if agreement.leaves_work and self._call is None:
                agreement.alarm.leave_work()
            agreement.what, agreement.alarm.call = self._around, self._call  # of the call that this one is part of


def is_lost(error: BaseException) -> bool:
    """Returns whether a collective failed because of another rank: gloo's errors have no type, but name its source
    files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _without_store(error: BaseException) -> str:
    return f"{_first_line(error)}; the store is gone too, and so the process that kept it, most often rank 0"


def _unreachable(error: BaseException, where: str) -> RankError:
    return RankError(
        f"the process group's store does not answer: {_first_line(error)}",
        where=where,
        remedy="look at the output of the process that keeps it, most often rank 0",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}" + (" …" if len(ranks) > 8 else "")


def _shown(text: str | None) -> str:
    if text is None:
        return " (which has none)"
    return f" ({text})" if len(text) <= _LONGEST_FACT else ""


def _brief(facts: Mapping[str, str]) -> str:
    """Returns which call a program is for."""
    shown = [f"{name}: {text}" for name, text in facts.items() if name.startswith(("the call", "the mode", "batch "))]
    return ", ".join(shown)[:_LONGEST_REASON]


def _first_line(error: BaseException) -> str:
    """Returns the error in short: without gloo's source file before it and its advice after it; and the node, if a
    program raised it that runs operator by operator."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    line = re.sub(r"^\[\S*/gloo/\S*\] ", "gloo: ", line).split(". This is")[0]
    generated = [e.line or "" for e in traceback.extract_tb(error.__traceback__) if e.filename.startswith("<eval_with")]
    node = re.match(r"(\w+) = ", generated[-1]) if generated else None
    return f"{line} (at the node {node[1]})" if node else line
