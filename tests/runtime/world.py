"""Real processes for tests: started once, each with its rank in a gloo group, and asked to run functions.

Enters: functions of a module, with arguments. Leaves: what every rank returned. A rank's exception is raised in the
test with the rank's traceback; ranks that do not answer in time are ended, so that nothing hangs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

# What ranks find loaded and done in most tests.
JOBS = "tests.runtime.warm"

# Captures make very many small objects; by Python's own thresholds the collector looks through them a hundred times.
GARBAGE = (50_000, 20, 100)

# Ranks must fail before the test that waits for them does.
GROUP_SECONDS, ANSWER_SECONDS = 60.0, 180.0


class RankFailed(Exception):
    """Exceptions of ranks, with their tracebacks."""


class World:
    """A pool of `size` processes in one group.

    Args:
        size: number of ranks.
        preload: module that the ranks find loaded.
        group_seconds: how long a collective waits.
        captures: where ranks write what they compile, and read what others have; None where each compiles by itself.
    """

    def __init__(
        self, size: int, preload: str, group_seconds: float = GROUP_SECONDS, captures: Path | None = None
    ) -> None:
        self.size, self._group_seconds = size, group_seconds
        self._preload, self._captures = preload, captures
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0
        self._has_run = False

    def run(self, job: Callable[..., Result], *args: Any, seconds: float = ANSWER_SECONDS) -> list[Result]:
        """Runs `job(*args)` on every rank and returns their results in the order of ranks.

        Raises:
            RankFailed: a rank raised, died or did not answer. The processes are replaced then.
        """
        if not self._ranks:
            self._start()
        self._has_run = True
        message = pickle.dumps((job, args))
        for _, connection in self._ranks:
            connection.send_bytes(message)
        deadline = time.monotonic() + seconds
        answers = [self._answer(rank, deadline) for rank in range(self.size)]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop(kill=True)
            raise RankFailed("\n".join(failures))
        return [value for _, value in answers]

    def forget(self, job: Callable[[], Any]) -> None:
        """Runs a job that frees what earlier ones left in the processes; nothing where none has run since."""
        if self._ranks and self._has_run:
            self.run(job)
            self._has_run = False

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        process, connection = self._ranks[rank]
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                return False, "no answer in time"
            ok, value = pickle.loads(connection.recv_bytes())
        except EOFError:
            process.join(5)
            return False, f"died with exit status {process.exitcode}"
        return bool(ok), value

    def _start(self) -> None:
        # Forked from one process that has torch and transformers loaded: a rank is there in a moment.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._preload])
        self._starts += 1
        store = str(Path(self._folder.name) / f"store{self._starts}")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = rank, self.size, store, self._group_seconds, self._captures, theirs
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self, kill: bool = False) -> None:
        """Ends the processes."""
        for process, connection in self._ranks:
            connection.close()
            if kill:
                process.kill()
        for process, _ in self._ranks:
            process.join(10)
            process.kill()
            process.join()
        self._ranks = []


def _serve(rank: int, size: int, store: str, seconds: float, captures: Path | None, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.captures import captured_once, passes_run_once
    from tests.runtime.warm import compiled_in_turn

    torch.set_num_threads(1)
    gc.set_threshold(*GARBAGE)
    gc.freeze()  # what the server has is never garbage
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    with contextlib.ExitStack() as stack:
        if captures is not None:
            stack.enter_context(captured_once(captures))
            stack.enter_context(passes_run_once(captures))
            stack.enter_context(compiled_in_turn(captures))
        while True:
            try:
                job, args = pickle.loads(connection.recv_bytes())
            except EOFError:  # the tests are over
                dist.destroy_process_group()
                return
            try:
                answer = pickle.dumps((True, job(*args)))
            except BaseException:  # noqa: BLE001 - whatever it is, the test raises it
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
