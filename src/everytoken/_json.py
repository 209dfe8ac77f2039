"""JSON that every program can read: numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from typing import Any


def plain_json(value: Any, indent: int | None = 1) -> str:
    """Like `json.dumps`, but with null instead of NaN and Infinity, which are no JSON."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
