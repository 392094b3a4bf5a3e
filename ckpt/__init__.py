"""Distributed checkpoints for PyTorch: standard files, saved on all ranks or on none.

    save, load                  save one state dict under a path, and load it
    load_adapter                loads an adapter of PEFT into a model in use
    Checkpointer                makes a training loop save and resume
    CheckpointCoordinator       does so with components, backend, loading strategy, device and ranks of your choice
    StateComponent              one part of a run's state: a key, an object and a sharing pattern
    SharingPattern              how the ranks hold a component: replicated, sharded, per rank, ...
    keep_tensor_class           lets checkpoints keep a class of tensors that wraps other tensors
    CheckpointManifest          the record of a checkpoint
    ComponentManifest           the record of one component in it
    __version__                 of this package

The public names are imported when they are first used: `import ckpt` alone does not import torch, so a command can check the
machine and print clear errors before torch and its plugins load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.api.adapters import load_adapter
    from ckpt.api.checkpointer import Checkpointer
    from ckpt.api.state_dicts import load, save
    from ckpt.coordinator import CheckpointCoordinator
    from ckpt.format.manifest import CheckpointManifest, ComponentManifest
    from ckpt.state.sharing import SharingPattern, StateComponent
    from ckpt.state.tensor_classes import keep_tensor_class
    from ckpt.version import __version__

_HOME = {
    "__version__": "ckpt.version",
    "CheckpointCoordinator": "ckpt.coordinator",
    "Checkpointer": "ckpt.api.checkpointer",
    "CheckpointManifest": "ckpt.format.manifest",
    "ComponentManifest": "ckpt.format.manifest",
    "SharingPattern": "ckpt.state.sharing",
    "StateComponent": "ckpt.state.sharing",
    "keep_tensor_class": "ckpt.state.tensor_classes",
    "load": "ckpt.api.state_dicts",
    "load_adapter": "ckpt.api.adapters",
    "save": "ckpt.api.state_dicts",
}

__all__ = [
    "CheckpointCoordinator",
    "CheckpointManifest",
    "Checkpointer",
    "ComponentManifest",
    "SharingPattern",
    "StateComponent",
    "__version__",
    "keep_tensor_class",
    "load",
    "load_adapter",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
