"""The element types that programs have, by the names of the text form and of a plan's precision.

Enters: nothing. Leaves: names and types, both ways. A value of any other type is refused where it is captured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
# Of a program's floating parameters by the plan's precision; None leaves them as they are.
PRECISION_DTYPES: Mapping[str, torch.dtype | None] = {
    "as_is": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_weights": torch.bfloat16,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
