"""Equality of values, types, order, attributes and bits, all the way down."""

from __future__ import annotations

import argparse
import types
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts are equal in every respect that a program can see."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, dict):
        return (
            all(same(mine, theirs) for mine, theirs in zip(a, b, strict=False))
            and len(a) == len(b)
            and all(same(a[key], b[key]) for key in a)
            and _same_attributes(a, b)
        )
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    if hasattr(a, "getvalue"):
        return bool(a.getvalue() == b.getvalue())
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)


def _same_attributes(a: Any, b: Any) -> bool:
    mine, theirs = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    return same(dict(mine or {}), dict(theirs or {})) if mine or theirs else True


def _bits(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data
