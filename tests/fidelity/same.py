"""Equality of values, types, order, attributes and bits, all the way down."""

from __future__ import annotations

import argparse
import types
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from ckpt.format.dtypes import contiguous, raw_bytes


def same(a: Any, b: Any) -> bool:
    """Whether two state dicts are equal in every respect that a program can see."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if hasattr(a, "__tensor_flatten__"):
            return same(_in_parts(a), _in_parts(b))
        alike = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return alike and (a.stride() == b.stride() or not (_fills_its_memory(a) and _fills_its_memory(b))) and _bits(a) == _bits(b)
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


def _in_parts(wrapper: Any) -> Any:
    names, context = wrapper.__tensor_flatten__()
    return wrapper.shape, context, {name: getattr(wrapper, name) for name in names}


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous() and 1 not in tensor.shape and tensor.numel() > 0


def _bits(tensor: torch.Tensor) -> bytes:
    data: bytes = raw_bytes(contiguous(tensor.cpu())).numpy().tobytes()
    return data
