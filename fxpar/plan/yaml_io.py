"""Options as lines of YAML.

Enters: a text. Leaves: the mapping it holds; what is no mapping, or names a key twice, is refused.
"""

from __future__ import annotations

from typing import Any

import yaml

from fxpar.errors import PlanError, shown


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: plain YAML lets the last line win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


def read_mapping(text: Any, where: str) -> dict[Any, Any]:
    """What a text holds; nothing where it is empty.

    Args:
        where: the text comes from, for errors.

    Raises:
        PlanError: it is no YAML, or no mapping.
    """
    if not isinstance(text, (str, bytes)):
        raise PlanError(f"{shown(text)} is no text", where=where, remedy="Plan.load reads a file")
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:  # of scalars and keys that are none
        reason = str(error).splitlines()[0]
        raise PlanError(f"not YAML: {reason}", where=where, remedy="write lines such as 'tp: 2'") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PlanError("the file holds no mapping", where=where, remedy="write lines such as 'tp: 2'")
    return values
