"""What test_grouped_gemm.py starts on each of two GPUs: `grouped_gemm_worker.py PRECISION`.

Each rank says that a step with Transformer Engine's products is that with torch's, but for how they round, or fails.
"""

import os
import sys

import torch
from torch import Tensor

import fxpar
from fxpar.cli.hf import build
from fxpar.ops import engine_products
from tests.runtime.expert_jobs import ROWS, batch
from tests.runtime.jobs import gradients

# Of the largest number of each gradient: several roundings, of 8 bits, or of the 10 of TF32, one behind the other.
TOLERANCES = {"bf16_weights": 2**-5, "bf16": 2**-5, "fp32": 2**-7}


def step(precision: str, grouped_gemm: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients; of one layer, so that both choose the same experts."""
    model = build("mixtral,num_hidden_layers=1", None, None, 0).model
    plan = fxpar.Plan(dp=2, ep=2, dispatch="exact", grouped_gemm=grouped_gemm, precision=precision)
    example = {key: value[: ROWS // 2] for key, value in batch().items()}
    made = fxpar.parallelize(model.train(), plan, example)
    own = fxpar.shard_batch({key: value.to(made.world.device) for key, value in batch().items()}, made)
    loss = made.train_step(own).item()
    return loss, {name: value.double().cpu() for name, value in gradients(made).items()}


def main() -> None:
    (precision,) = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_float32_matmul_precision("high")
    calls = 0
    original = engine_products._run

    def counted(*args: object, **how: object) -> None:
        nonlocal calls
        calls += 1
        original(*args, **how)  # type: ignore[arg-type]

    engine_products._run = counted
    loss, wanted = step(precision, "torch")
    assert calls == 0
    again, found = step(precision, "transformer_engine")
    assert calls == 6, calls
    gaps = {name: float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted}
    worst, tolerance = max(gaps, key=lambda name: gaps[name]), TOLERANCES[precision]
    is_alike = abs(again - loss) <= tolerance * abs(loss) and gaps[worst] <= tolerance
    told = f"losses {loss} {again}, gradients {gaps[worst]:.1e} {worst}"
    assert is_alike, told
    print(f"{precision}: alike, {told}")


if __name__ == "__main__":
    main()
