"""Every architecture of transformers that builds from a small configuration, split and compared with one device.

    python samples/zoo.py --tp 2 --jobs 8 --json zoo.jsonl     # all of them; go on with the same file after an end
    python samples/zoo.py --only swin qwen3_next               # some of them
    python samples/zoo.py --plan samples/plans/dp2_tp2.yaml --sample 60 --json dp2_tp2.jsonl

Each architecture runs in a process of its own, bounded in time and memory: it is built (`hf:TYPE`), trained for one
step by itself, captured, split by the plan and compared with one device in float64, in training mode with dropout on.
A sample takes the types in the order of their names' SHA-256, so that it is the same everywhere. The table says of
each: `exact`; `refused`, with the reason; `wrong`, where values or gradients differ; `failed`, where something else
than an error of fxpar's came out; `unbuilt` and `untrained`, where the small configuration gives no model that trains a
step on one device (these are not counted). Exit status 1 where any is wrong or failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.plan.plan import Plan

VERDICTS = ("exact", "refused", "wrong", "failed", "untrained", "unbuilt")
_NO_STEP = ("untrained", "unbuilt")  # there is no step to compare with
_GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        kind: its model type.
        verdict: one of `VERDICTS`.
        reason: why it is not exact; for an exact one how it was captured and what share of the matrix FLOPs is split.
        seconds: wall time.
    """

    kind: str
    verdict: str
    reason: str
    seconds: float


class _Attempt:
    """Something that may raise anything; what it raised is kept in `error`."""

    error: BaseException | None = None

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return isinstance(error, Exception)


def judge(kind: str, plan: Plan) -> tuple[str, str]:
    """Verdict and reason for one architecture."""
    import torch

    from fxpar.cli.models import SAMPLES, build
    from fxpar.errors import CheckFailed, FxparError, InputError
    from fxpar.verification import expect, verify

    torch.set_num_threads(1)
    try:
        built = build(kind, SAMPLES * plan.data_ranks, None, 0)
    except InputError as error:
        return "unbuilt", _line(error)
    model = built.model.train()
    if any(p.is_meta for p in model.parameters()):
        return "unbuilt", "the smallest configuration is too large"
    torch.manual_seed(0)
    with _Attempt() as step:
        outputs = model(**built.batch)
        loss = built.loss(outputs, built.batch) if built.loss is not None else outputs.loss
        loss.backward()
    if step.error is not None:
        return "untrained", f"{type(step.error).__name__}: {_line(step.error)}"
    model.zero_grad()
    try:
        found = expect(verify(model, built.batch, plan, loss=built.loss))
    except CheckFailed as error:
        return "wrong", _line(error)
    except FxparError as error:
        return "refused", _line(error)
    return "exact", f"{found.split_flops:.0%} split"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _worker(kind: str, plan: Plan, memory: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory * _GIB, memory * _GIB))
    with _Attempt() as attempt:
        pipe.send(judge(kind, plan))
    error = attempt.error
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        pipe.send(("failed", f"more than {memory} GiB"))
    elif error is not None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {_line(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
        pipe.send(("failed", text))
        traceback.print_exception(error)


@dataclass
class _Job:
    kind: str
    process: BaseProcess
    pipe: Connection
    begun: float


def sweep(kinds: Sequence[str], plan: Plan, jobs: int, limit: float, memory: int) -> Iterator[Row]:
    """Judges the architectures, a few at a time; each in a process that ends after `limit` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "fxpar.verification", "fxpar.cli.models"])
    waiting, running = list(reversed(kinds)), list[_Job]()
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop()
            mine, other = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(kind, plan, memory, other))
            process.start()
            other.close()
            running.append(_Job(kind, process, mine, time.monotonic()))
        wait([job.pipe for job in running], timeout=1.0)
        for job in list(running):
            row = _row(job, limit)
            if row is not None:
                running.remove(job)
                yield row


def _row(job: _Job, limit: float) -> Row | None:
    """The job's row once it has ended or has taken too long."""
    seconds = time.monotonic() - job.begun
    if job.pipe.poll():
        try:
            verdict, reason = job.pipe.recv()
        except EOFError:
            job.process.join()
            verdict, reason = "failed", f"the process ended with {job.process.exitcode}"
    elif seconds > limit:
        job.process.kill()
        verdict, reason = "failed", f"not done after {limit:.0f} s"
    else:
        return None
    job.process.join()
    return Row(job.kind, verdict, reason, round(seconds, 1))


def _known(file: Path | None) -> dict[str, Row]:
    if file is None or not file.exists():
        return {}
    rows = (Row(**json.loads(line)) for line in file.read_text().splitlines())
    return {row.kind: row for row in rows}


def sample(kinds: Iterable[str], number: int, rows: Mapping[str, Row]) -> list[str]:
    """Returns the first `number` types, ascending by SHA-256 of their names, that no row says train no step."""
    trained = (kind for kind in kinds if kind not in rows or rows[kind].verdict not in _NO_STEP)
    return sorted(trained, key=lambda kind: hashlib.sha256(kind.encode()).hexdigest())[:number]


def _print_table(rows: Sequence[Row]) -> None:
    for verdict in VERDICTS[1:]:
        chosen = [row for row in rows if row.verdict == verdict]
        if chosen:
            print(f"\n{verdict}: {len(chosen)}")
        for row in chosen:
            print(f"  {row.kind:28} {row.seconds:6.1f} s  {row.reason}")
    # The same reason at another place is one class.
    classes = Counter(re.sub(r"[\w./]+\.py:\d+|\d+(\.\d+)?", "#", r.reason) for r in rows if r.verdict == "refused")
    print("\nreasons of refusals:")
    for reason, number in classes.most_common():
        print(f"  {number:4} {reason[:160]}")
    counts = Counter(row.verdict for row in rows)
    trained = sum(counts[verdict] for verdict in VERDICTS[:4])
    print(f"\n{counts['exact']} of {trained} exact; " + ", ".join(f"{counts[v]} {v}" for v in VERDICTS[1:]))


def main() -> int:
    """Runs the sweep and prints the table."""
    import transformers

    from fxpar.errors import PlanError
    from fxpar.plan.plan import Plan

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = options.add_mutually_exclusive_group()
    split.add_argument("--tp", type=int, default=2, help="ranks that split each layer")
    split.add_argument("--plan", type=Path, metavar="FILE", help="a plan's YAML, in place of --tp")
    options.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options.add_argument("--limit", type=float, default=300.0, help="seconds for one architecture")
    options.add_argument("--memory", type=int, default=8, help="GiB for one architecture")
    which = options.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="TYPE", help="these architectures, done already or not")
    which.add_argument("--sample", type=int, metavar="N", help="N that train a step, in the order of their hashes")
    options.add_argument(
        "--trained", type=Path, metavar="FILE", help="rows of another sweep: what does not train there"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="append each row; what is there is not done again")
    args: Any = options.parse_args()
    if args.trained is not None and not args.trained.exists():
        options.error(f"{args.trained} is not there")
    try:
        plan = Plan(tp=args.tp) if args.plan is None else Plan.load(args.plan)
    except PlanError as error:
        options.error(str(error))
    rows = _known(args.json)
    idle = {kind: row for kind, row in _known(args.trained).items() if row.verdict in _NO_STEP}
    every = [kind for kind in sorted(transformers.CONFIG_MAPPING.keys()) if kind not in idle]
    kinds = args.only or (every if args.sample is None else sample(every, args.sample, rows))
    waiting = args.only or [kind for kind in kinds if kind not in rows]
    while waiting:
        for row in sweep(waiting, plan, args.jobs, args.limit, args.memory):
            rows[row.kind] = row
            print(f"{row.kind:28} {row.verdict:9} {row.seconds:6.1f} s  {row.reason[:200]}", flush=True)
            if args.json is not None:
                with args.json.open("a") as out:
                    out.write(json.dumps(asdict(row)) + "\n")
        if args.sample is not None:  # others in place of those that train no step
            kinds = sample(every, args.sample, rows)
        waiting = [kind for kind in kinds if kind not in rows]
    shown = [rows[kind] for kind in kinds if kind in rows]
    _print_table(shown)
    return int(any(row.verdict in ("wrong", "failed") for row in shown))


if __name__ == "__main__":
    sys.exit(main())
