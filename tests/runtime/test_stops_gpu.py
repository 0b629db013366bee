"""On two GPUs: one rank fails, and no other waits for it, be it in NCCL, in a kernel, in a stream or in a graph."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).parents[2]
LIMIT = 10.0
WAYS = [
    ("nccl", "none"),
    ("nccl", "partial"),
    ("nccl", "full_iteration"),
    ("copies", "none"),
    ("copies", "full_iteration"),
]
WAYS += [("shots", "none"), ("shots", "full_iteration")]
# What all ranks are told: in the call, where nothing was under way, else behind it.
BEFORE = "InputError: the call: differs: rank 0: train_step, its program; rank 1: train_step, compiles a program"
REFUSED = "RankError: rank 1, train_step: an earlier call failed: Broken: "
CASES = ["before", "between", "behind", "killed"]


def on_two_ranks(*arguments: str) -> str:
    """What two processes print that no launcher looks after: it would end the others itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    common["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stops_worker.py")), *arguments],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize(("way", "impl"), WAYS)
def test_nobody_waits_for_a_rank_that_fails(way: str, impl: str, what: str) -> None:
    output = on_two_ranks(way, impl, what)
    told = {
        (int(r), int(c)): (float(s), t) for r, c, s, t in re.findall(r"rank (\d), call (\d): (\S+) s: (.*)", output)
    }
    assert told or what == "killed", output
    assert all(seconds < LIMIT for seconds, _ in told.values()), output
    if what == "before":
        assert len(told) == 6, output
        assert told[0, 0][1].startswith(BEFORE), output
        assert told[1, 0][1].startswith(BEFORE), output
        assert all(text.startswith("loss") for (_, call), (_, text) in told.items() if call), output
        return
    if what != "killed":
        assert told[1, 0][1].startswith("Broken: "), output
        assert all(told[rank, call][1].startswith(REFUSED) for rank in (0, 1) for call in (1, 2)), output
        assert "a new process group" in told[0, 1][1], output
        assert "the device goes on: 8.0" in output
        assert len(re.findall(r"rank \d anew: \S+ s: loss", output)) == 2, output
    else:
        if (way, impl) == ("copies", "none"):  # of a full queue nobody is left who could end the waits
            assert "fxpar: rank 0, train_step: rank 1 gave no sign: ended" in output
            return
        assert (0, 1) in told, output
        assert told[0, 1][1].startswith("RankError: rank 0, train_step: "), output
        assert "rank 1 gave no sign" in told[0, 1][1], output
