"""Copies, and waits and writes of a word, by a CUDA stream: they take no multiprocessor.

Enters: a stream and addresses on devices. Leaves: nothing. While the stream is captured they become nodes of the graph.
They are asked of the driver: torch has no waits, and its copies take tensors of both ends and the stream's being the
current one, all of which the host has to make.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NAME = "libcuda.so.1"


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write, which is a union of 48 bytes."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    ]


@cache
def _driver() -> Any:
    """The driver.

    Raises:
        OSError: there is none.
    """
    library = ctypes.CDLL(_NAME)
    library.cuStreamWriteValue32_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuStreamWriteValue32_v2.restype = ctypes.c_int
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    library.cuStreamBatchMemOp_v2.restype = ctypes.c_int
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.cuThreadExchangeStreamCaptureMode.restype = ctypes.c_int
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def copy(stream: int, there: int, here: int, size: int) -> None:
    """The stream copies some bytes from `here` to `there`, which may be another device's.

    Raises:
        RuntimeError: the driver refuses.
    """
    if size:
        _check(_driver().cuMemcpyDtoDAsync_v2(there, here, size, stream))


def take_down(stream: int, addresses: Sequence[int]) -> None:
    """The stream goes on when all words are 1, and makes them 0: one operation of it, or one node of a graph.

    Raises:
        RuntimeError: the driver refuses.
    """
    waits = [_Operation(_WAIT, address, 1, _EQUAL) for address in addresses]
    operations = waits + [_Operation(_WRITE, address, 0) for address in addresses]
    batch = (_Operation * len(operations))(*operations)
    _check(_driver().cuStreamBatchMemOp_v2(stream, len(operations), batch, 0))


def write_value(stream: int, address: int, value: int) -> None:
    """The stream writes the word, behind all that it wrote before; the address may be another device's.

    Raises:
        RuntimeError: the driver refuses.
    """
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value, 0))


def allow_while_captured() -> None:
    """Lets this thread ask for events while another captures a graph, which it takes no part in.

    Raises:
        RuntimeError: the driver refuses.
    """
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED))))


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"the CUDA driver refuses an operation of a stream: {(name.value or b'?').decode()}")
