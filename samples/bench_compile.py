"""How long fxpar takes from a model to the program that each rank runs, and how much memory.

    python samples/bench_compile.py                                  # all models at full depth
    python samples/bench_compile.py --model llama-70b --layers 20 40 80
    python samples/bench_compile.py --model llama-512 --tp 512 --json
    python samples/bench_compile.py --model llama-8b --tp 8 --dp 8

Models are transformers' own, on the meta device: nothing is computed and no weight is in memory. The clock runs from
the first line of the capture to the localised program, checked after each pass. The text of a program names no rank,
so that one compilation serves all ranks; `llama-512` has a head for each of 512 of them. Each line comes from a process
of its own, whose peak memory includes what Python and PyTorch take before there is a model.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import fxpar
from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.cost.flops import split_flops
from fxpar.ir.program import PassRecord
from fxpar.manager import Verifier
from fxpar.passes import DEFAULT_PASSES
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC

PASSES = tuple(item.name for item in DEFAULT_PASSES)


@dataclass(frozen=True)
class Size:
    """A model to compile.

    Attributes:
        kind: the configuration's name without `Config`.
        options: what it is called with besides the number of layers.
        layers: how many there are, and by what name the configuration calls that.
        tp: ranks that split each layer.
        sequence: positions of the example.
    """

    kind: str
    options: Mapping[str, int]
    layers: tuple[str, int]
    tp: int
    sequence: int


def _llama(hidden: int, intermediate: int, heads: tuple[int, int], layers: int, tp: int) -> Size:
    options = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": 128256}
    options |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 8192}
    return Size("Llama", options, ("num_hidden_layers", layers), tp, 8192)


_GPT = {"n_embd": 3072, "n_head": 32, "n_positions": 1024, "vocab_size": 51200}

MODELS: Mapping[str, Size] = {
    "llama-8b": _llama(4096, 14336, (32, 8), 32, 8),
    "gpt-8.3b": Size("GPT2", _GPT, ("n_layer", 72), 8, 1024),
    "llama-70b": _llama(8192, 28672, (64, 8), 80, 8),
    "llama-512": replace(_llama(65536, 262144, (512, 512), 32, 512), sequence=4096),
}


def build(size: Size, layers: int) -> torch.nn.Module:
    """The model without memory, in training mode."""
    config = getattr(transformers, f"{size.kind}Config")(
        use_cache=False, bos_token_id=1, eos_token_id=2, **size.options, **{size.layers[0]: layers}
    )
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.train()


class Watch:
    """Seconds of the passes and of the checks after them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PASSES, "checks"), 0.0)

    def passed(self, record: PassRecord) -> None:
        self.seconds[record.name] = record.seconds

    def timed(self, verifier: Verifier) -> Verifier:
        """The verifier, with a clock."""

        def check(*given: Any) -> None:  # the program, and for some its facts
            start = time.perf_counter()
            verifier.check(*given)
            self.seconds["checks"] += time.perf_counter() - start

        return replace(verifier, check=check)


def measure(size: Size, layers: int, tp: int, dp: int) -> dict[str, Any]:
    """Compiles one model in this process."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model, watch = build(size, layers), Watch()
    ids = torch.zeros(2 * dp, size.sequence, dtype=torch.long, device="meta")
    start, worked = time.perf_counter(), time.process_time()
    captured = capture(model, {"input_ids": ids, "labels": ids.clone()}, fxpar.Plan(tp=tp, dp=dp))
    seconds = {"capture": time.perf_counter() - start}
    verifiers = [watch.timed(verifier) for verifier in STATIC]
    program = compile_program(captured.program, verifiers=verifiers, on_pass=watch.passed)
    total, cpu = time.perf_counter() - start, time.process_time() - worked
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "layers": layers,
        "tp": tp,
        "dp": dp,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "nodes": len(program.graph.nodes),
        "seconds": {**seconds, **watch.seconds, "total": total, "cpu": cpu},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "split_flops": split_flops(program),
        "text_bytes": len(print_program(program).encode()),
    }


def measure_apart(name: str, layers: int, tp: int, dp: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--here", "--model", name, "--layers", str(layers), "--tp", str(tp)]
    command += ["--dp", str(dp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"model": name, **found}


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a line for each compilation; the passes besides the choice of layouts are quick, and stand in one sum."""
    columns = ("capture", "annotate", "other passes", "checks", "total", "cpu")
    table = Table(title="seconds from a model to the program of each rank")
    for title in ("model", "tp", "dp", "layers", "weights", "nodes", *columns, "peak", "split", "text"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        spent = row["seconds"] | {"other passes": sum(row["seconds"][name] for name in PASSES if name != "annotate")}
        seconds = [f"{spent[column]:.1f}" for column in columns]
        sizes = [str(row[key]) for key in ("tp", "dp", "layers")]
        sizes += [f"{row['parameters'] / 1e9:.1f} G", str(row["nodes"])]
        ends = [f"{row['peak_bytes'] / 2**30:.1f} GiB", f"{row['split_flops']:.1%}", f"{row['text_bytes'] >> 10} KiB"]
        table.add_row(row["model"], *sizes, *seconds, *ends)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print("cpu: of the total, the seconds that the process ran; the others it waited for its turn.")
    print("split: share of the matrix FLOPs that tp divides. text: of the program, the same for every rank.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="which ones (all)")
    parser.add_argument("--layers", nargs="+", type=int, help="depths to compile each at (its own)")
    parser.add_argument("--tp", type=int, help="ranks that split each layer (8; 512 of llama-512)")
    parser.add_argument("--dp", type=int, default=1, help="groups of them that share out the batch (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON list and no table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, which measures one
    options = parser.parse_args()
    if options.layers and min(options.layers) < 1:
        parser.error("--layers must be at least 1")
    if options.here:
        size = MODELS[options.model[0]]
        print(json.dumps(measure(size, options.layers[0], options.tp, options.dp)))
        return
    rows = []
    for name in options.model:
        for layers in options.layers or [MODELS[name].layers[1]]:
            print(f"compiling {name} with {layers} layers", file=sys.stderr)
            rows.append(measure_apart(name, layers, options.tp or MODELS[name].tp, options.dp))
    if options.json:
        print(json.dumps(rows))
    else:
        report(rows)


if __name__ == "__main__":
    main()
