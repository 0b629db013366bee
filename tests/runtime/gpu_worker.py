"""What test_gpu.py starts on every GPU: `gpu_worker.py CASE PRECISION`. Rank 0 prints whether the runs are equal."""

import os
import sys

import torch

import fxpar
from fxpar.plan.plan import Plan
from tests.zoo import CASES

STEPS, TOLERANCE = 5, 1e-4


def losses(name: str, plan: Plan) -> list[float]:
    """Trains the case on a GPU of each process, with torch's own fused optimizer, clipping and loss scaling."""
    case = CASES[name]
    model = fxpar.parallelize(case.model(), plan, case.example(), case.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30) if plan.precision == "fp16" else None
    assert model.world.device.type == "cuda"
    found = []
    for _ in range(STEPS + 20 * (scaler is not None)):  # from where gradients overflow, the scale comes down
        optimizer.zero_grad()
        found.append(model.train_step(case.example(), scaler=scaler).item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert scaler is None or 1.0 < scaler.get_scale() < 2.0**30
    saved = model.full_state_dict()
    assert all(value.device.type == "cpu" for value in saved.values())
    model.load_full_state_dict(saved)
    return found


def main() -> None:
    name, precision = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    del os.environ["RANK"]  # a plan of ones joins no group
    alone = losses(name, Plan(precision=precision))
    os.environ["RANK"] = str(rank)
    split = losses(name, CASES[name].plan(size).replace(precision=precision))
    gap = max(abs(a - b) for a, b in zip(alone, split, strict=True))
    # In half precision the runs round differently: they must train alike, not be equal.
    is_equal = gap <= (TOLERANCE if precision == "fp32" else 0.1)
    assert split[-1] < split[0], split
    if rank == 0:
        print(f"{name} {precision} on {size}: {'equal' if is_equal else 'different'}, gap {gap:.1e}, {split}")


if __name__ == "__main__":
    main()
