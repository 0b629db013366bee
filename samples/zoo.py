"""Every architecture of transformers that builds from a small configuration, split and compared with one device.

    python samples/zoo.py --tp 2 --jobs 8 --json zoo.jsonl     # all of them; go on with the same file after an end
    python samples/zoo.py --only swin qwen3_next               # some of them

Each architecture runs in a process of its own, bounded in time and memory: it is built (`hf:TYPE`), trained for one
step by itself, captured, split over tp ranks and compared with one device in float64, in training mode with dropout
on. The table says of each: `exact`; `refused`, with the reason; `wrong`, where values or gradients differ; `failed`,
where something else than an error of fxpar's came out; `unbuilt` and `untrained`, where the small configuration gives
no model that trains a step on one device (these are not counted). Exit status 1 where any is wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

VERDICTS = ("exact", "refused", "wrong", "failed", "untrained", "unbuilt")
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


def judge(kind: str, tp: int) -> tuple[str, str]:
    """Verdict and reason for one architecture."""
    import torch

    from fxpar.cli.hf import build
    from fxpar.errors import CheckFailed, FxparError, InputError
    from fxpar.plan.plan import Plan
    from fxpar.verification import expect, verify

    torch.set_num_threads(1)
    try:
        built = build(kind, None, None, 0)
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
        found = expect(verify(model, built.batch, Plan(tp=tp), loss=built.loss))
    except CheckFailed as error:
        return "wrong", _line(error)
    except FxparError as error:
        return "refused", _line(error)
    return "exact", f"{found.split_flops:.0%} split"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _worker(kind: str, tp: int, memory: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory * _GIB, memory * _GIB))
    with _Attempt() as attempt:
        pipe.send(judge(kind, tp))
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


def sweep(kinds: Sequence[str], tp: int, jobs: int, limit: float, memory: int) -> Iterator[Row]:
    """Judges the architectures, a few at a time; each in a process that ends after `limit` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "fxpar.verification", "fxpar.cli.hf"])
    waiting, running = list(reversed(kinds)), list[_Job]()
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop()
            mine, other = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(kind, tp, memory, other))
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

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options.add_argument("--limit", type=float, default=300.0, help="seconds for one architecture")
    options.add_argument("--memory", type=int, default=8, help="GiB for one architecture")
    options.add_argument("--only", nargs="+", metavar="TYPE", help="these architectures, done already or not")
    options.add_argument("--json", type=Path, metavar="FILE", help="append each row; what is there is not done again")
    given: Any = options.parse_args()
    rows = _known(given.json)
    every = sorted(transformers.CONFIG_MAPPING.keys())
    kinds = given.only or [kind for kind in every if kind not in rows]
    for row in sweep(kinds, given.tp, given.jobs, given.limit, given.memory):
        rows[row.kind] = row
        print(f"{row.kind:28} {row.verdict:9} {row.seconds:6.1f} s  {row.reason[:200]}", flush=True)
        if given.json is not None:
            with given.json.open("a") as out:
                out.write(json.dumps(asdict(row)) + "\n")
    shown = [rows[kind] for kind in (given.only or every) if kind in rows]
    _print_table(shown)
    return int(any(row.verdict in ("wrong", "failed") for row in shown))


if __name__ == "__main__":
    sys.exit(main())
