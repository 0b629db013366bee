"""Small legal schedules, and what may be said against a schedule, by brute force."""

from collections import Counter, deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import Action, Phase, Schedule

EXAMPLES = settings(max_examples=400, deadline=None, derandomize=True)
# A part of the reason for each fault.
SAID = {
    "nowhere": "there is no",
    "elsewhere": "is on rank",
    "twice": "runs a second time",
    "beside its part": "is the whole backward",
    "missing": "lacks",
    "early": "which the rank runs later",
    "forever": "waits forever",
    "crossed": ", and message",
}


@st.composite
def legal(draw: st.DrawFn) -> Schedule:
    """Schedules of all kinds."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "forward_only"]))
    pp, microbatches = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    many = {"zbv": 2, "gpipe": draw(st.integers(1, 2)), "forward_only": draw(st.integers(1, 2))}
    bound = 2 if name in ("interleaved_1f1b", "zb_h1") and microbatches % pp == 0 else 1
    return build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=many.get(name, bound))


@st.composite
def mutated(draw: st.DrawFn) -> Schedule:
    """A legal schedule, changed up to three times."""
    schedule = draw(legal())
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, len(ranks) - 1))
        actions = ranks[rank]
        if not actions:
            continue
        at, to = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        action = actions[at]
        change = draw(st.sampled_from(["swap", "neighbours", "drop", "twice", "move", "away", "whole", "another"]))
        if change == "swap":
            actions[at], actions[to] = actions[to], actions[at]
        elif change == "neighbours":
            actions[at - 1], actions[at] = actions[at], actions[at - 1]
        elif change == "drop":
            del actions[at]
        elif change == "twice":
            actions.insert(to, action)
        elif change == "move":
            actions.insert(to, actions.pop(at))
        elif change == "away":
            ranks[draw(st.integers(0, len(ranks) - 1))].append(actions.pop(at))
        elif change == "whole" and action.phase is Phase.BACKWARD:
            actions[at : at + 1] = [action._replace(phase=Phase(letter)) for letter in "IW"]
        else:
            stages, microbatches = st.integers(0, schedule.stages), st.integers(0, schedule.microbatches)
            actions[at] = Action(draw(stages), draw(st.sampled_from(Phase)), draw(microbatches))
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def faults(schedule: Schedule) -> set[str]:
    """All that is wrong with a schedule, by counting and by running it with queues; empty if it is legal."""
    held = [set(schedule.stages_of(rank)) for rank in range(schedule.pp)]
    every = [(stage, mb) for stage in range(schedule.stages) for mb in range(schedule.microbatches)]
    found = set()
    for rank, actions in enumerate(schedule.ranks):
        for stage, _, mb in actions:
            if (stage, mb) not in every:
                found.add("nowhere")
            elif stage not in held[rank]:
                found.add("elsewhere")
        if max(Counter(actions).values(), default=0) > 1:
            found.add("twice")
    there = {(stage, str(phase), mb) for actions in schedule.ranks for stage, phase, mb in actions}
    training = any(phase != "F" for _, phase, _ in there)
    for stage, mb in every:
        back = "".join(letter for letter in "BIW" if (stage, letter, mb) in there)
        if (stage, "F", mb) not in there or (training and back in ("", "I", "W")):
            found.add("missing")
        if back not in ("", "B", "I", "W", "IW"):
            found.add("beside its part")
    for rank, actions in enumerate(schedule.ranks):
        for at, action in enumerate(actions):
            later = {(stage, str(phase), mb) for stage, phase, mb in actions[at + 1 :]}
            if any(need in later and need[0] in held[rank] for need in needs(schedule, action)):
                found.add("early")
    return found or {*stuck(schedule), *crossed(schedule)}


def needs(schedule: Schedule, action: Action) -> set[tuple[int, str, int]]:
    """Whatever must have run before an action, wherever it runs; of a backward either form."""
    stage, phase, mb = action
    if phase == "F":
        return {(stage - 1, "F", mb)} if stage else set()
    if phase == "W":
        return {(stage, "I", mb)}
    after = {(stage + 1, "B", mb), (stage + 1, "I", mb)} if stage + 1 < schedule.stages else set()
    return after | {(stage, "F", mb)}


def stuck(schedule: Schedule) -> set[str]:
    """Runs whatever can run until nothing can, messages being found wherever they are."""
    left, done = [deque(actions) for actions in schedule.ranks], set[tuple[int, str, int]]()
    every = {(stage, str(phase), mb) for actions in schedule.ranks for stage, phase, mb in actions}
    moved = True
    while moved:
        moved = False
        for queue in left:
            if queue and needs(schedule, queue[0]) & every <= done:
                stage, phase, mb = queue.popleft()
                done.add((stage, str(phase), mb))
                moved = True
    return {"forever"} if any(left) else set()


def crossed(schedule: Schedule) -> set[str]:
    """Runs whatever can run with a queue for each channel: what is taken out must be what is needed."""
    left = [deque(actions) for actions in schedule.ranks]
    queues: dict[tuple[int, int, str], deque[tuple[int, int]]] = {}
    rank_of = {stage: rank for rank in range(schedule.pp) for stage in schedule.stages_of(rank)}
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            if not queue:
                continue
            stage, phase, mb = queue[0]
            forward, step = phase == "F", 1 if phase == "F" else -1
            kind = "activation" if forward else "gradient"
            source, target = stage - step, stage + step
            if phase != "W" and rank_of.get(source, rank) != rank:
                channel = queues.setdefault((rank_of[source], rank, kind), deque())
                if not channel:
                    continue
                if channel.popleft() != (source, mb):
                    return {"crossed"}
            queue.popleft()
            moved = True
            if phase != "W" and rank_of.get(target, rank) != rank:
                queues.setdefault((rank, rank_of[target], kind), deque()).append((stage, mb))
    return set()
