"""Copies, and waits and writes of a word, by a CUDA stream: they take no multiprocessor.

Enters: a stream and addresses on devices. Leaves: nothing. While the stream is captured they become nodes of the graph.
They are asked of the driver: torch has no waits, and its copies take tensors of both ends and the stream's being the
current one, all of which the host has to make.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NAME = "libcuda.so.1"


@cache
def _driver() -> Any:
    """The driver.

    Raises:
        OSError: there is none.
    """
    found = ctypes.CDLL(_NAME)
    for function in (found.cuStreamWaitValue32_v2, found.cuStreamWriteValue32_v2):
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    found.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    found.cuMemcpyDtoDAsync_v2.restype = ctypes.c_int
    found.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    found.cuThreadExchangeStreamCaptureMode.restype = ctypes.c_int
    found.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return found


def copy(stream: int, there: int, here: int, size: int) -> None:
    """The stream copies some bytes from `here` to `there`, which may be another device's.

    Raises:
        RuntimeError: the driver refuses.
    """
    if size:
        _check(_driver().cuMemcpyDtoDAsync_v2(there, here, size, stream))


def wait_value(stream: int, address: int, value: int) -> None:
    """The stream goes on when the word is that value.

    Raises:
        RuntimeError: the driver refuses.
    """
    _check(_driver().cuStreamWaitValue32_v2(stream, address, value, _EQUAL))


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
