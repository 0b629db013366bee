"""What test_copies_gpu.py starts on each of two GPUs.

`equal`: trainings whose ranks copy beside those through NCCL; rank 0 prints which are equal to the bit on all ranks.
`experts`: the same of experts on both, eager and as one graph.
`needed`: of experts on more, whose tokens go to those GPUs alone that need them: equal to itself, near to NCCL.
`chunks`: a training in chunks of tokens as one graph: near to one without, equal to itself, and where a rank is late.
`lost`: rank 1 stands still in a call.
`several`: each kind of copy between more ranks than there are GPUs.
"""

import os
import random
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fxpar
from fxpar.cudagraphs.full import Iteration
from fxpar.ops import peer_copies
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.peer_memory.compiler.symmetric_buffer import needs
from fxpar.peer_memory.runtime.device import GpuSymmetricBuffer
from fxpar.runtime.steps import FinishedForward
from tests.cudagraphs.graphed import Trained, gpt2, llama, mixtral, train, words

STEPS, MICROBATCHES = 12, 2
NCCL, COPY = fxpar.Communication("nccl"), fxpar.Communication("copy")
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (partial(gpt2, 128, 2), {"tp": 2}),
    "llama": (partial(llama, 128, 2), {"tp": 2, "sequence_parallel": True}),
}
# Sums beside which nothing is computed in one shot, and all sums.
COSTS = {
    "copies": fxpar.Cost(least_copy=1.0, copy_latency=1e-12),
    "shots": fxpar.Cost(least_copy=1.0, copy_latency=1.0),
}


def compare() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, (build, plan) in PLANS.items():
        batches = words(STEPS, MICROBATCHES)
        plain = train(build, batches, communication=NCCL, **plan)
        assert len(set(plain.losses)) == len(plain.losses)
        for how, cost in COSTS.items():
            for impl in ("none", "full_iteration"):
                found = train(build, batches, impl, communication=COPY, cost=cost, **plan)
                same = torch.tensor(int(found == plain), device="cuda")
                dist.all_reduce(same, op=dist.ReduceOp.MIN)
                if dist.get_rank() == 0:
                    print(f"{name} {how} {impl}: {'equal' if int(same) else 'different'}", flush=True)


def compare_experts() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for way in ("allgather", "alltoall"):
        for impl in ("none", "full_iteration"):  # each with itself: a graph multiplies all rows by each expert's matrix
            batches = words(STEPS, MICROBATCHES)
            plan: dict[str, Any] = {"dp": 2, "ep": 2, "experts": fxpar.Experts(way)}
            plain = train(partial(mixtral, 128, 2), batches, impl, communication=NCCL, **plan)
            found = train(partial(mixtral, 128, 2), batches, impl, communication=COPY, cost=COSTS["copies"], **plan)
            same = torch.tensor(int(found == plain), device="cuda")
            dist.all_reduce(same, op=dist.ReduceOp.MIN)
            if dist.get_rank() == 0:
                print(f"{way} {impl}: {'equal' if int(same) else 'different'}", flush=True)


def compare_needed() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    size = int(os.environ["WORLD_SIZE"])
    for impl in ("none", "full_iteration"):
        batches = words(STEPS, MICROBATCHES)
        plan: dict[str, Any] = {
            "dp": size,
            "ep": size,
            "experts": fxpar.Experts("allgather"),
            "cost": COSTS["copies"],
        }
        plain = train(partial(mixtral, 128, 2), batches, impl, communication=NCCL, **plan)
        first, second = (train(partial(mixtral, 128, 2), batches, impl, communication=COPY, **plan) for _ in range(2))
        near = all(abs(a - b) < 1e-2 * abs(b) for a, b in zip(first.losses, plain.losses, strict=True))
        same = torch.tensor(int(first == second and near), device="cuda")
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            print(f"{impl}: {'equal' if int(same) else 'different'}", flush=True)


def compare_chunks() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan: dict[str, Any] = {"tp": size, "sequence_parallel": True, "compile": True, "cost": COSTS["copies"]}
    chunks = fxpar.Communication("copy", token_chunks=3)

    def own(batches: list[Any], how: fxpar.Communication, touch: Any = None) -> Trained:
        return train(partial(llama, 128, 2), batches, "full_iteration", communication=how, touch=touch, **plan)

    batches = words(100, rows=5)
    whole, *cut = (own(batches, how) for how in (COPY, chunks, chunks))
    near = all(abs(a - b) < 1e-3 * abs(b) for a, b in zip(cut[0].losses, whole.losses, strict=True))
    delays = random.Random(0)

    def be_late(model: fxpar.ParallelModule, step: int) -> None:
        if delays.random() < 0.05 and rank == 1:
            time.sleep(0.05)

    more = words(1000, rows=5)
    late, soon = own(more, chunks, be_late), own(more, chunks)
    found = {"near": near, "again": cut[0] == cut[1], "late": late == soon}
    same = torch.tensor([int(value) for value in found.values()], device="cuda")
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if rank == 0:
        print(
            "\n".join(f"{name}: {'equal' if value else 'different'}" for name, value in zip(found, same, strict=True))
        )


def stand_still(*arguments: Any, **options: Any) -> None:
    time.sleep(60.0)
    os._exit(0)


def lose() -> None:
    torch.manual_seed(0)
    batch = words(1)[0]
    plan = fxpar.Plan(
        tp=2,
        communication=fxpar.Communication("copy"),
        cost=COSTS["copies"],
        cuda_graphs=fxpar.CudaGraphs(sys.argv[2]),
    )
    # Inputs that are compared would end the other rank's wait before its GPU waits.
    model = fxpar.parallelize(gpt2(128, 2).train(), plan, batch, check_inputs=False, timeout=5.0)
    for _ in range(4):
        model.train_step(batch)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:  # stands still behind the point where all ranks have come to the call
        for kind, name in ((FinishedForward, "backward"), (Iteration, "__call__")):
            setattr(kind, name, stand_still)
    float(model.train_step(batch))
    print(f"loss {float(model.train_step(batch))}", flush=True)


def several() -> None:
    dist.init_process_group("gloo")
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    made = GpuSymmetricBuffer(rank=rank, size=size, device=device, group=dist.group.WORLD.group_name)  # type: ignore[union-attr]
    symmetric_buffer.register("several", made.open())
    cut = (0, [(1, None)])
    for turn, dtype in enumerate((torch.bfloat16, torch.float32, torch.float64)):
        seeds = [torch.Generator().manual_seed(10 * turn + r) for r in range(size)]
        parts = [torch.randint(-9, 9, (size * (size + 1), 3), generator=g).to(device, dtype) for g in seeds]
        own, whole = parts[rank], torch.stack(parts)
        blocks = whole.view(size, size, size + 1, 3)
        total = peer_copies.summed(peer_copies.start_sum(own, "several", 1), "several", 1)
        gathered = peer_copies.gathered(peer_copies.start_gather(own, "several", 2), *cut, "several", 2)
        scattered = peer_copies.scattered(peer_copies.start_scatter(own, *cut, size, "several", 3), *cut, "several", 3)
        sent = peer_copies.start_exchange(own, *cut, size, "several", 4)
        exchanged = peer_copies.exchanged(sent, 0, cut[1], "several", 4)
        shot = peer_copies.sum_in_one_shot(own, "several", 5)
        # Experts of each token, two a rank and some beyond them; and what each rank made of all tokens.
        chosen = torch.randint(0, 2 * size + 2, (len(own), 3), generator=torch.Generator().manual_seed(turn)).to(device)
        tokens = len(own) // size  # of each rank
        expanded = peer_copies.expand_copied(own[:tokens], chosen, 2, size, "several", 6)
        summed = peer_copies.sum_copied(own.unsqueeze(0), chosen, 2, size, "several", 7)
        torch.cuda.synchronize()
        wanted = needs(chosen, 2, rank).unsqueeze(-1)
        assert torch.equal(expanded[0], torch.cat([part[:tokens] for part in parts]).where(wanted, 0))
        terms = [part.where(needs(chosen, 2, r).unsqueeze(-1), 0) for r, part in enumerate(parts)]
        assert torch.equal(summed, torch.stack(terms).sum(0)[rank * tokens : (rank + 1) * tokens])
        assert torch.equal(total, whole.sum(0))
        assert torch.equal(shot, whole.sum(0))
        assert torch.equal(gathered, whole.flatten(0, 1))
        assert torch.equal(scattered, blocks[:, rank].sum(0))
        assert torch.equal(exchanged, blocks[:, rank].flatten(0, 1))
        dist.barrier()
        across(rank, size, device, dtype)
    symmetric_buffer.close(["several"])
    print("equal", flush=True)


def across(rank: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Blocks of rows that lie apart, of few bytes and of many, in a graph: values change between replays."""
    cut = (1, [(1, None)])
    for width in (3, 1024):
        own = torch.zeros(3, 32 * size, width, device=device, dtype=dtype)

        def run(own: torch.Tensor = own) -> tuple[torch.Tensor, torch.Tensor]:
            scattered = peer_copies.scattered(
                peer_copies.start_scatter(own, *cut, size, "several", 8), *cut, "several", 8
            )
            return scattered, peer_copies.gathered(
                peer_copies.start_gather(scattered, "several", 9), *cut, "several", 9
            )

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scattered, gathered = run()
        for turn in range(3):
            seeds = [torch.Generator().manual_seed(100 * turn + r) for r in range(size)]
            parts = [torch.randint(-9, 9, own.shape, generator=g).to(device, dtype) for g in seeds]
            own.copy_(parts[rank])
            graph.replay()
            torch.cuda.synchronize()
            total = torch.stack(parts).sum(0)
            assert torch.equal(gathered, total)
            assert torch.equal(scattered, total.unflatten(1, (size, 32))[:, rank])
            dist.barrier()


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    jobs = {"equal": compare, "experts": compare_experts, "needed": compare_needed, "lost": lose, "several": several}
    jobs["chunks"] = compare_chunks
    jobs[sys.argv[1]]()
