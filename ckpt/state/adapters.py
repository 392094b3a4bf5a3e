"""Adapters of a PEFT model as components of their own, and the base model below them: saved, or known by its source and a digest.

The tensors of an adapter have the names of PEFT's own files, and are those in use, sharded as they are: a load fills them in place.
"""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

import torch

from ckpt.errors import ConfigurationError, check_choice
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import contiguous, raw_bytes
from ckpt.format.manifest import ArrayEntry
from ckpt.format.strict_json import fit, read
from ckpt.ranks.topology import Topology
from ckpt.state.address import local_tensor
from ckpt.state.flatten import Path, TensorLeaf
from ckpt.state.sharing import StateComponent, find_aliases
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState
from ckpt.state.wrappers import Unwrapping

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

CONFIG = "adapter_config"
"""Key of the text of PEFT's adapter_config.json, in the component of an adapter."""
CONFIG_NAME = "adapter_config.json"
_BASE, DIGEST = "base_model_name_or_path", "digest"
_MAY_DIFFER = {_BASE, "revision", "peft_version", "auto_mapping", "inference_mode", "task_type", "init_lora_weights", "lora_dropout"}
"""Options of an adapter that do not change what its tensors mean."""


def is_peft(module: object) -> bool:
    """Whether an object is a `PeftModel`, or one in DDP or another wrapper."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, torch.nn.Module) and isinstance(Unwrapping(module).inner, peft.PeftModel)


def keys_of_parts(key: str, module: torch.nn.Module) -> list[str]:
    """Return the keys of the components that stand for a PEFT model under a key: of the adapters, then of the base."""
    start = "" if key == "model" else f"{key}-"
    return [*(f"{start}adapter-{name}" for name in Unwrapping(module).inner.peft_config), f"{start}base"]  # type: ignore[union-attr]


def base_below(key: str, keys: Collection[str]) -> str | None:
    """Return the key of the base, of the components of a checkpoint, that lies below the adapter with this key; None: it is not there."""
    starts = (f"{key[: match.start()]}base" for match in re.finditer("adapter-", key))
    return next((base for base in starts if base in keys), None)


def with_adapters(component: StateComponent, base: str | None, topology: Topology) -> list[StateComponent]:
    """Return the components that stand for one; it alone, unless its object is a PEFT model. Collective for one that is.

    Args:
        base: "saved", or "frozen": the base is known by its source and digest alone; None: a PEFT model is one component, as others are.

    Raises:
        ConfigurationError: the base is not frozen, or an adapter is of a kind whose files do not hold the tensors in use; on every rank.
    """
    module = component.stateful.module if isinstance(component.stateful, ModelState) else component.stateful
    if base is None or not isinstance(module, torch.nn.Module) or not is_peft(module):
        return [component]
    check_choice("peft_base", base, ("frozen", "saved"))
    adapters = adapter_states(module)
    below: Any = BaseState(module, adapters)
    with topology.operation(f"look at the adapters of {component.key}"):
        with topology.phase("adapters"):
            below.require_complete(is_frozen=base == "frozen")
        if base == "frozen":
            below = FrozenBase(below, state_digest({"base": below}, topology))
    parts = zip(keys_of_parts(component.key, module), [*adapters, below], strict=True)
    return [replace(component, key=key, stateful=part) for key, part in parts]


def adapter_states(module: torch.nn.Module) -> list[AdapterState]:
    """Return the adapters of a PEFT model."""
    return [AdapterState(module, name) for name in Unwrapping(module).inner.peft_config]  # type: ignore[union-attr]


class _Part(ModelState, ABC):
    """Some of a module's tensors, which a load fills in place."""

    tied_names: Any = None  # they are found by their memory
    rank_private: Any = None

    @abstractmethod
    def names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return names in the component -> names in a state dict of the module."""

    def tensors(self) -> dict[str, Any]:
        """Return the tensors in use by their names in the component."""
        state = super().state_dict()
        return {name: state[given] for name, given in self.names(state).items()}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for _, parameter in self.own(self.module.named_parameters()))

    def own(self, given: Iterable[tuple[str, _Tensor]]) -> Iterator[tuple[str, _Tensor]]:
        """Yield those tensors of the module that are of this part, by their names in the component."""
        keys, unwrapped = {name: key for key, name in self.names(super().state_dict()).items()}, Unwrapping(self.module)
        return ((keys[name], tensor) for whole, tensor in given if (name := unwrapped.name(whole)) in keys)

    def paths_to_save(self, tensors: Collection[str], paths: Mapping[str, Path]) -> Collection[str]:
        return ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the tensors are filled."""


class AdapterState(_Part):
    """One adapter: its tensors and its `modules_to_save`, by the names in PEFT's file, and its config.

    Args:
        module: the `PeftModel`, or one in DDP or another wrapper.
        adapter: its name in the model.

    Raises:
        ConfigurationError: the model has no adapter of this name.
    """

    def __init__(self, module: torch.nn.Module, adapter: str = "default") -> None:
        super().__init__(module)
        self.adapter = adapter
        self._model: Any = Unwrapping(module).inner
        configs = getattr(self._model, "peft_config", {})
        if adapter not in configs:
            raise ConfigurationError(f"adapter={adapter}: the model has no such adapter; it has {', '.join(configs) or 'none'}")

    @property
    def config(self) -> dict[str, Any]:
        """What PEFT writes as adapter_config.json."""
        config = self._model.peft_config[self.adapter].to_dict() | {"inference_mode": True}
        found: dict[str, Any] = json.loads(json.dumps(config, default=sorted))  # its sets as lists
        return found

    def names(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return names in PEFT's file -> names in a state dict of the module.

        Raises:
            ConfigurationError: the file would hold something else than tensors of the model.
        """
        from peft import get_peft_model_state_dict

        known = {id(tensor): name for name, tensor in state.items()}
        found = get_peft_model_state_dict(self._model, state_dict=dict(state), adapter_name=self.adapter, save_embedding_layers=False)
        for name, tensor in found.items():
            if id(tensor) not in known:
                raise self._kind_error(f"{name} in its file is computed")
        return {name: known[id(tensor)] for name, tensor in found.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors() | {CONFIG: json.dumps(self.config, indent=2, sort_keys=True)}

    def prepare_from(
        self, saved: Mapping[str, ArrayEntry], plain: Mapping[str, Any], paths: Mapping[str, Path], *, cast: bool = False
    ) -> None:
        """Refuse an adapter of another kind, rank or target, or with another scale."""
        if CONFIG in plain:
            self.require_like(read(fit(plain[CONFIG], str, CONFIG), dict[str, Any], CONFIG))

    def require_like(self, saved: Mapping[str, Any]) -> None:
        """Refuse the config of an adapter whose tensors would mean something else here.

        Raises:
            ConfigurationError
        """
        own = self.config
        differing = [name for name in own if name in saved and name not in _MAY_DIFFER and _in_order(own[name]) != _in_order(saved[name])]
        if differing:
            was, now = (", ".join(f"{name}={_in_order(config[name])}" for name in differing) for config in (saved, own))
            raise ConfigurationError(
                f"adapter {self.adapter} was saved with {was}, and this run makes it with {now}; make it as it was saved"
            )

    def require_names_all(self, unnamed: Collection[str]) -> None:
        """Refuse tensors of this adapter that its file would not hold."""
        inside = next((name for name in unnamed if f".{self.adapter}." in f"{name}."), None)
        if inside is not None:
            raise self._kind_error(f"its file does not hold {inside}")

    def _kind_error(self, why: str) -> ConfigurationError:
        kind = self.config["peft_type"]
        return ConfigurationError(f"adapter {self.adapter} ({kind}): {why}; save the model whole, without peft_base")


class BaseState(_Part):
    """The model below the adapters, by the names that it has without them."""

    def __init__(self, module: torch.nn.Module, adapters: Collection[AdapterState]) -> None:
        super().__init__(module)
        self._adapters = adapters

    @property
    def source(self) -> str:
        """The name or path that the base was loaded from; "": none is known."""
        return next((str(name) for adapter in self._adapters if (name := adapter.config.get(_BASE))), "")

    def names(self, state: Mapping[str, Any]) -> dict[str, str]:
        leaves: dict[str, TensorLeaf] = {name: leaf for name, leaf in state.items() if isinstance(leaf, torch.Tensor)}
        tied = find_aliases(leaves, {})  # of an adapter that several layers share
        claimed = {tied.get(name, name) for adapter in self._adapters for name in adapter.names(state).values()}
        return {_base_name(name): name for name in state if tied.get(name, name) not in claimed}

    def require_complete(self, *, is_frozen: bool) -> None:
        """Refuse a model of which a checkpoint would lack something.

        Raises:
            ConfigurationError
        """
        unnamed = self.names(ModelState.state_dict(self)).values()
        for adapter in self._adapters:
            adapter.require_names_all(unnamed)
        trained = [name for name, parameter in self.own(self.module.named_parameters()) if parameter.requires_grad]
        if is_frozen and trained:
            raise ConfigurationError(
                f"peft_base=frozen, but {trained[0]} of the base is trained; give modules_to_save to the adapter, or save the base with "
                "peft_base=saved"
            )

    def prepare_from(
        self, saved: Mapping[str, ArrayEntry], plain: Mapping[str, Any], paths: Mapping[str, Path], *, cast: bool = False
    ) -> None:
        if DIGEST in plain:
            raise ConfigurationError("the checkpoint knows the base by its digest alone; go on with peft_base=frozen")

    def buffers(self) -> dict[str, str]:
        """Return the floating-point buffers, which a forward pass may change: name -> digest of this rank's values."""
        local = {name: local_tensor(buffer).cpu() for name, buffer in self.own(self.module.named_buffers()) if buffer.is_floating_point()}
        return {name: digest_of(raw_bytes(contiguous(tensor)).numpy().tobytes()) for name, tensor in local.items()}


class FrozenBase:
    """The model below the adapters as a component: its source and its digest, without its tensors.

    Args:
        digest: of its tensors, by the names that it has without adapters; it does not depend on the layout.
    """

    sharing_pattern = "replicated"

    def __init__(self, base: BaseState, digest: str) -> None:
        self._base = base
        self._state = {"source": base.source, DIGEST: digest}
        self._buffers = base.buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return the reference.

        Raises:
            ConfigurationError: the base has changed.
        """
        now = self._base.buffers() if self._buffers else {}
        changed = [name for name, digest in self._buffers.items() if now[name] != digest]
        if changed:
            raise ConfigurationError(f"peft_base=frozen, but training changes {min(changed)} of the base; save it with peft_base=saved")
        return dict(self._state)

    def prepare_from(
        self, saved: Mapping[str, ArrayEntry], plain: Mapping[str, Any], paths: Mapping[str, Path], *, cast: bool = False
    ) -> None:
        """Refuse another base."""
        if DIGEST not in plain:
            raise ConfigurationError("the checkpoint holds the base itself; go on with peft_base=saved")
        if fit(plain[DIGEST], str, DIGEST) != self._state[DIGEST]:
            was, now = (f"{state.get('source') or 'a base without a name'} (digest {state[DIGEST]:.12})" for state in (plain, self._state))
            raise ConfigurationError(f"the adapters were trained on {was}, and this run has {now}; load the base that they were trained on")

    def paths_to_save(self, tensors: Collection[str], paths: Mapping[str, Path]) -> Collection[str]:
        return ()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: the base is the one that was saved."""


def require_same_name(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the config of an adapter that names another base. A name and a path that ends in it are one.

    Raises:
        ConfigurationError
    """
    was, now = saved.get(_BASE), own.get(_BASE)
    if was and now and PurePath(f"{was}").name != PurePath(now).name:
        raise ConfigurationError(
            f"the adapter was trained on {was}, and this run has {now}; load that base, or, if it is the same model, change {_BASE} in "
            f"{CONFIG_NAME}"
        )


def _base_name(name: str) -> str:
    """Return the name of a tensor in the model without adapters."""
    name = name.removeprefix("base_model.").removeprefix("model.")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _in_order(value: Any) -> Any:
    """The names of modules are a set."""
    return sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value
