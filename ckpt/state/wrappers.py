"""Names of a module's tensors without the wrappers around modules: torch.compile, DDP, FSDP1, activation checkpointing.

A wrapper is a module of one of torch's classes below, found in the module's tree. A name is never changed for how it reads: a user's own
module may be called `module`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection

import torch

_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
}
"""Module and class -> the attribute that holds what is wrapped. A class whose module nobody has imported has no instances."""

_ATTRIBUTES = frozenset(_WRAPPERS.values())


class Unwrapping:
    """The names of one module's tensors, with its wrappers as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = module
        kinds = {getattr(sys.modules[name], kind): at for (name, kind), at in _WRAPPERS.items() if name in sys.modules}
        self._attributes: dict[type, str] = {}  # by each class in the tree, of which there are few
        for one in _classes(module):
            for kind, attribute in kinds.items():
                if issubclass(one, kind):
                    self._attributes[one] = attribute

    @property
    def inner(self) -> torch.nn.Module:
        """The module without the wrappers around the whole of it."""
        module = self._root
        while (wrapped := self._wrapped(module)) is not None:
            module = wrapped[1]
        return module

    @property
    def is_needed(self) -> bool:
        """Whether there are wrappers."""
        return bool(self._attributes)

    def name(self, given: str) -> str:
        """The name without wrappers. Hooks of some wrappers have left their part out already."""
        if not self._attributes:
            return given
        kept: list[str] = []
        module: torch.nn.Module | None = self._root
        for part in given.split("."):
            while module is not None and (wrapped := self._wrapped(module)) is not None and part != wrapped[0]:
                module = wrapped[1]
            if module is not None and (wrapped := self._wrapped(module)) is not None:
                module = wrapped[1]
                continue
            kept.append(part)
            module = None if module is None else module._modules.get(part)
        return ".".join(kept)

    def _wrapped(self, module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
        """The attribute of a wrapper and what it wraps; None: it is no wrapper."""
        attribute = self._attributes.get(type(module))
        inner = None if attribute is None else module._modules.get(attribute)
        return None if attribute is None or inner is None else (attribute, inner)


def saved_under(wanted: Callable[[], Collection[str]], saved: Collection[str]) -> dict[str, str]:
    """Name -> the name with parts of wrappers under which an earlier version has saved it, of those that are not saved without.

    Here names are all there is to go by. A pair counts if both are the same without all parts that are called like a wrapper's
    attribute, the saved name is wanted by nothing, and there is no second such pair.

    Args:
        wanted: returns the names; asked only if a saved one has such a part, which is rare.
    """
    suspicious = [name for name in saved if not _ATTRIBUTES.isdisjoint(name.split("."))]
    if not suspicious:
        return {}
    own = wanted()
    strange = {name: _bare(name) for name in suspicious if name not in own}
    missing: dict[str, list[str]] = {}
    for name in own:
        if name not in saved:
            missing.setdefault(_bare(name), []).append(name)
    often = Counter(strange.values())
    return {
        missing[bare][0]: name for name, bare in strange.items() if often[bare] == 1 and len(missing.get(bare, ())) == 1
    }


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)


def _classes(root: torch.nn.Module) -> set[type]:
    """The classes of all modules of a tree; faster than `Module.modules`, which names them."""
    found: set[type] = set()
    left = [root]
    while left:
        module = left.pop()
        found.add(type(module))
        left += [child for child in module._modules.values() if child is not None]
    return found
