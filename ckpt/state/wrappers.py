"""Names of a module's tensors without the parts of wrappers: torch.compile, DDP, FSDP1, activation checkpointing.

Wrappers are found by class in the module's tree, never by name: a user's own module may be called `module`.
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
"""(Module, class) -> attribute that holds the wrapped module. A class whose module is not imported has no instances."""

ATTRIBUTES = frozenset(_WRAPPERS.values())


class Unwrapping:
    """Names of one module's tensors without wrappers, as the module is wrapped now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = module
        kinds = {getattr(sys.modules[name], kind): at for (name, kind), at in _WRAPPERS.items() if name in sys.modules}
        self._attributes: dict[type, str] = {}  # by wrapper class in the tree
        for base in _classes(module):
            for kind, attribute in kinds.items():
                if issubclass(base, kind):
                    self._attributes[base] = attribute

    @property
    def wrappers(self) -> list[torch.nn.Module]:
        """The wrappers around all of the module, the outermost first."""
        found, module = [], self._root
        while (wrapped := self._wrapped(module)) is not None:
            found.append(module)
            module = wrapped[1]
        return found

    @property
    def inner(self) -> torch.nn.Module:
        """The module without the wrappers around all of it."""
        around = self.wrappers
        inner = self._wrapped(around[-1]) if around else None
        return self._root if inner is None else inner[1]

    @property
    def is_needed(self) -> bool:
        """Whether there are wrappers."""
        return bool(self._attributes)

    def name(self, given: str) -> str:
        """Return a tensor's name without wrappers. State dict hooks of some wrappers have removed their part already."""
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
        """Return (attribute, wrapped module) of a wrapper; None for any other module."""
        attribute = self._attributes.get(type(module))
        inner = None if attribute is None else module._modules.get(attribute)
        return None if attribute is None or inner is None else (attribute, inner)


def saved_under(wanted: Callable[[], Collection[str]], saved: Collection[str]) -> dict[str, str]:
    """Map wanted names to saved names that contain parts of wrappers, as an earlier version saved them.

    Only names are known here. A pair matches if both are equal without all parts that are named like a wrapper's attribute, the
    wanted name is not saved, the saved name is not wanted, and the match is unique.

    Args:
        wanted: returns the wanted names; called only if a saved name has such a part, which is rare.
    """
    suspicious = [name for name in saved if not ATTRIBUTES.isdisjoint(name.split("."))]
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
    return ".".join(part for part in name.split(".") if part not in ATTRIBUTES)


def _classes(root: torch.nn.Module) -> set[type]:
    """Return the classes of all modules of a tree. Faster than `Module.modules`, which builds names."""
    found: set[type] = set()
    left = [root]
    while left:
        module = left.pop()
        found.add(type(module))
        left += [child for child in module._modules.values() if child is not None]
    return found
