from collections.abc import Iterator
from unittest import mock

import pytest

from fxpar.capture import capture as module_of_capture
from tests.captures import CAPTURE


@pytest.fixture(scope="package", autouse=True)
def _captures_are_made() -> Iterator[None]:
    """What is tested here is made anew by every test."""
    with mock.patch.object(module_of_capture, "_capture", CAPTURE):
        yield
