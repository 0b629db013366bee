"""Rows of `tests.runtime.loops`: copies, wrappers, types and devices."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.runtime.jobs import compile_and_call
from tests.runtime.loops import row

COPIED = "cannot be copied"


@row(refused=COPIED)
def deep_copy(m: Any, b: Any) -> Any:
    copy.deepcopy(m)


@row(refused=COPIED)
def shallow_copy_of_a_part(m: Any, b: Any) -> Any:
    copy.copy(m.blocks[0])


@row(refused=COPIED)
def pickled(m: Any, b: Any) -> Any:
    pickle.dumps(m.blocks[0].norm)


@row(refused=COPIED)
def saved(m: Any, b: Any) -> Any:
    torch.save(m, io.BytesIO())


@row(refused="DistributedDataParallel")
def distributed(m: Any, b: Any) -> Any:
    nn.parallel.DistributedDataParallel(m)


@row(refused="fully_shard")
def sharded_by_layer(m: Any, b: Any) -> Any:
    for block in m.blocks:
        fully_shard(block)


@row(refused="torch.compile", places=("tp",))
def compiled(m: Any, b: Any) -> Any:
    compile_and_call(m, b)


@row(refused="compile()")
def compiled_by_layer(m: Any, b: Any) -> Any:
    for block in m.blocks:
        block.compile()


@row(refused="cannot be moved or cast")
def cast(m: Any, b: Any) -> Any:
    m.to(torch.bfloat16)


@row(refused="cannot be moved or cast")
def cast_part(m: Any, b: Any) -> Any:
    m.norm.double()


@row()
def moved_to_where_it_is(m: Any, b: Any) -> Any:
    return m.to("cpu") is m, m.float() is m, m.blocks[0].to("cpu", torch.float32) is m.blocks[0], m.cpu() is m


@row(refused="cannot be moved or cast")
def moved_elsewhere(m: Any, b: Any) -> Any:
    m.blocks[0].to("meta")


@row(refused="cannot be moved or cast")
def emptied(m: Any, b: Any) -> Any:
    m.to_empty(device="cpu")
