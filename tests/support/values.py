"""Are two nested values equal, in type and to the bit? For what plain `==` says too little or too much about."""

from __future__ import annotations

import argparse
import io
import types
from typing import Any

import numpy as np
import torch

from tests.support.states import same_bits


def same_values(a: Any, b: Any) -> bool:
    """Whether two nested values are alike. Dictionaries of any class are; so are NumPy's arrays in any byte order."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (
            a.shape == b.shape and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and a.tolist() == b.tolist()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same_values(vars(a), vars(b))
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_values, a, b))
    return bool(a == b)
