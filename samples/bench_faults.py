"""Seconds until a training ends when one of its ranks fails, and what the others say.

    python samples/bench_faults.py                                         # gloo on CPUs, or NCCL on two GPUs
    python samples/bench_faults.py --faults killed hung --plans tp --timeout 30

Each case is a training of two processes. In the middle of its steps one of them

    killed          is killed (SIGKILL)
    store killed    is killed, and is the one that keeps the store: as if the first machine were lost
    hung            stands still (SIGSTOP)
    memory          finds no memory in a step
    error           raises an error of the author's model in a step
    disk            finds no room for a save

The table has the seconds from there until the other process ended, and the last line that it wrote. Where `disk`
failed, the others train on: the program catches the error and ends by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import fxpar

PLANS: Mapping[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "dp, parameters": {"dp": 2, "shard": "parameters"},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "microbatches": 2},
}
FAULTS = ("killed", "store killed", "hung", "memory", "error", "disk")
STEPS = 5  # before the fault


def train(chosen: argparse.Namespace) -> None:
    """What each of the two processes does."""
    fault, rank = chosen.faults[0], int(os.environ["RANK"])
    is_odd = rank == (0 if fault == "store killed" else 1)
    plan = fxpar.Plan(**PLANS[chosen.plans[0]])
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = transformers.GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (4, 32))
    batch = {"input_ids": ids, "labels": ids}
    model = fxpar.parallelize(transformers.GPT2LMHeadModel(config), plan, batch, timeout=chosen.timeout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if model.world.device.type == "cuda":
        batch = {name: value.to(model.world.device) for name, value in batch.items()}
    step = 0
    while True:
        batches: Any = [batch] * plan.microbatches if plan.microbatches > 1 else batch
        if step == STEPS and is_odd:
            (Path(chosen.folder) / "moment").write_text(str(time.time()))
            break_down(fault, model)
        float(model.train_step(batches))
        optimizer.step()
        optimizer.zero_grad()
        if fault == "disk" and step >= STEPS:
            save(model, optimizer, Path(chosen.folder))
            return
        step += 1


def break_down(fault: str, model: fxpar.ParallelModule) -> None:
    """Has this process fail a little later, in the middle of its steps."""
    if fault in ("killed", "store killed", "hung"):
        number = signal.SIGSTOP if fault == "hung" else signal.SIGKILL
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    elif fault == "memory":
        fail_in_step(lambda: torch.empty(1 << 60, dtype=torch.uint8, device=model.world.device))
    elif fault == "error":
        fail_in_step(lambda: [][1])
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fail_in_step(action: Any) -> None:
    """Has something called between two operators of the next step."""

    class Failing(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            if self.calls == 20:
                action()
            return function(*args, **(kwargs or {}))

    mode: Any = Failing
    mode().__enter__()


def save(model: fxpar.ParallelModule, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """A save that cannot be written, and a step behind it."""
    try:
        model.save_training(folder / "saves", optimizer)
    except fxpar.FxparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def case(fault: str, plan: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs the two processes of a case, and ends them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        free.close()
        words = ["--folder", folder, "--timeout", str(chosen.timeout), "--faults", fault, "--plans", plan]
        processes = []
        for rank in range(2):
            variables = {**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (Path(folder) / f"error{rank}").open("wb") as errors:
                command = [sys.executable, __file__, *words]
                processes.append(subprocess.Popen(command, stderr=errors, stdout=errors, env=variables))
        odd = 0 if fault == "store killed" else 1
        other = processes[1 - odd]
        try:
            other.wait(chosen.timeout * 4 + 120)
            ended: float | None = time.time()
        except subprocess.TimeoutExpired:
            ended = None
        for process in processes:
            process.kill()
            process.wait()
        moment = Path(folder) / "moment"
        # Before the fault comes, what the one that is to have it says is of interest.
        file = Path(folder) / f"error{1 - odd if moment.exists() else odd}"
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        said = [line for line in lines if "Error" in line] or lines or ["nothing"]
        row = {"fault": fault, "plan": plan, "seconds": None, "status": other.returncode, "line": said[-1]}
        if not moment.exists():
            row["line"] = f"failed before: {said[-1]}"
        elif ended is not None:
            row["seconds"] = ended - float(moment.read_text())
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that ranks wait for each other (30)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (1)")
    parser.add_argument("--json", type=Path, help="append a JSON line for each case")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.folder:
        train(chosen)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = Table("fault", "plan", "seconds", "exit", "what the other rank said", show_lines=True)
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        cases = [(fault, plan) for fault in chosen.faults for plan in chosen.plans]
        for row in pool.map(lambda pair: case(pair[0], pair[1], chosen), cases):
            seconds = "still there" if row["seconds"] is None else f"{row['seconds']:.1f}"
            table.add_row(row["fault"], row["plan"], seconds, str(row["status"]), row["line"])
            if chosen.json:
                with chosen.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
