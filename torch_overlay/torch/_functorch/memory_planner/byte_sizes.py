"""Parses sizes of memory as users write them: 25769803776, "24GiB", "24 GB"."""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Any


_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def as_bytes(value: Any) -> int:
    """A positive number of bytes, from a number (rounded down) or text like "24 GiB".

    K, M, G and T are powers of 1,000, or of 1,024 if followed by an i.  Case does not
    matter, and the final B is optional.  Raises ValueError for everything else.
    """
    number: Any = value
    unit = 1
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        number = float(match[1]) if match else 0
        if match and match[2]:
            base = 1024 if match[3] else 1000
            unit = base ** ("kmgt".index(match[2].lower()) + 1)
    elif getattr(value, "ndim", None) == 0:
        # A scalar of numpy or torch.
        number = value.item()
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not 1 <= number * unit < math.inf:
        raise ValueError(
            "must be a positive number of bytes, which is rounded down to a whole "
            "number, or text such as '24GiB'"
        )
    return int(number * unit)
