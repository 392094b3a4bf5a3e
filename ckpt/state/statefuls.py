"""Components for the usual objects of a training run: a module, an optimizer by parameter name, the random generators.

Their `state_dict` returns the tensors in use, so a load fills these in place, and `load_state_dict` only sets the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from glob import escape
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import ConfigurationError, MissingStateError, sentence
from ckpt.format.manifest import ArrayEntry
from ckpt.memory.device import Device
from ckpt.state.abilities import refusing_state
from ckpt.state.address import local_tensor, place_of
from ckpt.state.flatten import Path, flatten, unflatten
from ckpt.state.optimizer_state import OptimizerState, ties_of
from ckpt.state.sharing import Stateful, find_aliases
from ckpt.state.tensor_classes import empty_tensor, is_wrapper, parts_of
from ckpt.state.wrappers import Unwrapping, saved_under

__all__ = ["Filled", "Given", "ModelState", "OptimizerState", "RNGState", "as_stateful", "loads_by_own_code"]


class ModelState:
    """A module's parameters and persistent buffers, by name.

    Names are free of wrappers (`wrappers`): a checkpoint of a compiled module or of one in DDP loads into the bare module, and
    vice versa. Checkpoints of earlier versions, whose names may contain parts of wrappers, load too.

    Args:
        module: may declare `tied_names`, {alias: first name}, for weights that are tied across ranks.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._saved_as: dict[str, str] = {}  # name -> saved name, during a load
        self._prepared: dict[str, Any] | None = None  # what a load fills, if the module itself makes its entries of those

    @property
    def tied_names(self) -> dict[str, str]:
        tied = ties_of(self.module)
        return {self._saved_as.get(a, a): self._saved_as.get(b, b) for a, b in tied.items()}

    @property
    def rank_private(self) -> list[str]:
        """Names of the buffers that DDP gives to all ranks from rank 0, at each forward pass: copies of these differ until then."""
        names = Unwrapping(self.module)
        ddp = next((wrapper for wrapper in names.wrappers if isinstance(wrapper, DistributedDataParallel)), None)
        if ddp is None or not ddp.broadcast_buffers:
            return []
        return [escape(names.name(given)) for given, _ in self.module.named_buffers()]

    def prepare_from(
        self,
        saved: Mapping[str, ArrayEntry],
        plain: Mapping[str, Any],
        paths: Mapping[str, Path],
        *,
        cast: bool = False,
    ) -> None:
        """Match names that an earlier version saved. The module's tensors exist already.

        A module whose own code takes part in a load, such as a hook that renames old entries, is given the entries that were saved if
        these are others than its own.
        """
        self.forget_prepared()
        self._saved_as = saved_under(lambda: self.state_dict().keys(), saved.keys())
        if not loads_by_own_code(self.module):
            return
        own = flatten(self.state_dict(), "the module")
        if own.tensors.keys() != saved.keys():
            made: dict[str, Any] = {}
            for key, entry in saved.items():
                fits = key in own.tensors and place_of(own.tensors[key], key)[:2] == (entry.dtype, entry.shape)
                made[key] = own.tensors[key] if fits else empty_tensor(entry)
            for alias, first in find_aliases(own.tensors, {}).items():  # one of their names may have been saved
                for name, other in ((alias, first), (first, alias)):
                    if other in made:
                        made.setdefault(name, made[other])
            self._prepared = unflatten(made, {key: (key,) for key in made} | own.paths | dict(paths))

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that it saves."""
        return self.module.parameters()

    def forget_prepared(self) -> None:
        """Return to the module's own names and entries."""
        self._saved_as = {}
        self._prepared = None

    def paths_to_save(self, tensors: Collection[str], paths: Mapping[str, Path]) -> Collection[str]:
        """Return the keys of tensors that are no entries of the state dict itself: those that a quantized weight wraps."""
        return [key for key in tensors if paths[key][0] != key]

    def state_dict(self) -> dict[str, Any]:
        if self._prepared is not None:
            return self._prepared
        state = self.module.state_dict()
        names = self._names(state)
        return dict(state) if names is None else {names[key]: value for key, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the values that were not loaded in place: buffers kept elsewhere, `get_extra_state` values.

        A module whose own code takes part in a load is given all of them.
        """
        current = self.module.state_dict()
        given = {name: key for key, name in (self._names(current) or {}).items()}
        named = {given.get(name, name): value for name, value in state_dict.items()}
        if self._prepared is not None:
            try:
                self.module.load_state_dict(named)
            except RuntimeError as error:
                raise MissingStateError(f"the module does not take what was saved: {sentence(error)}") from error
        elif loads_by_own_code(self.module, beside_torch=True):
            self.module.load_state_dict(named, strict=False)
        elif elsewhere := {name: value for name, value in named.items() if not _same_memory(current.get(name), value)}:
            self.module.load_state_dict(elsewhere, strict=False)
        self.forget_prepared()

    def _names(self, given: Collection[str]) -> dict[str, str] | None:
        """Return names of the module -> names in the checkpoint; None if all are equal."""
        unwrapping = Unwrapping(self.module)
        if not unwrapping.is_needed and not self._saved_as:
            return None
        return {key: self._saved_as.get(name := unwrapping.name(key), name) for key in given}


class RNGState:
    """All random generators of a rank: Python, NumPy, torch on the CPU and on each device of the rank.

    The states are plain bytes. The coordinator restores them after all other components, whose loads may draw numbers.

    A saved state fits only the rank that saved it. If a run continues on other ranks under `elastic=derive`, every rank seeds its
    generators from the run's seed, its stream and the step.

    Args:
        seed: of the run; None: the states can be restored but not derived.
        stream: (number, count): this rank's stream of random numbers, of all streams of the run. Ranks that must draw equal
            numbers, such as those of one tensor-parallel group, share a stream.
        step: returns the number of steps that the run has made.
    """

    restored_last = True
    sharing_pattern = "per_rank"

    def __init__(
        self,
        device: Device,
        *,
        seed: int | None = None,
        stream: tuple[int, int] = (0, 1),
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._device = device
        self._seed = seed
        self._stream = stream
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": {name: bytes(state.tolist()) for name, state in self._device.rng_state().items()},
        }
        if self._seed is not None:
            state |= {"seed": self._seed, "stream": list(self._stream), "step": self._step()}
        return state

    @refusing_state("the random generators")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore saved states, and the seed of the run that saved them.

        Raises:
            CorruptCheckpointError: a generator refuses its state.
        """
        self._adopt_seed(state_dict)
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        states = {name: torch.tensor(list(state), dtype=torch.uint8, device="cpu") for name, state in state_dict["torch"].items()}
        self._device.set_rng_state(states)

    @refusing_state("the random generators")
    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether a saved state has the stream and the kinds of devices of this rank."""
        same_stream = list(saved.get("stream", self._stream)) == list(self._stream)
        return same_stream and set(saved["torch"]) == set(self._device.rng_state())

    @refusing_state("the random generators")
    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Derive the state from the seed and step of a saved one, and this rank's stream.

        Raises:
            ConfigurationError: the states were saved without a seed.
        """
        if "seed" not in saved[0]:
            raise ConfigurationError(
                "the random generators were saved without the run's seed, so no state for other ranks follows from them; "
                "make RNGState(device, seed=..., stream=..., step=...), or load on the ranks that saved"
            )
        self._adopt_seed(saved[0])
        self.seed(saved[0]["seed"], saved[0]["step"])

    def _adopt_seed(self, saved: Mapping[str, Any]) -> None:
        if self._seed is not None:
            self._seed = saved.get("seed", self._seed)

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed all generators of this rank: equal for equal (seed, stream, step), unrelated otherwise."""
        own = int(np.random.SeedSequence([seed, *self._stream, step]).generate_state(1)[0])
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)


class Given:
    """A nested state dict as the object of a component. A load takes whatever was saved.

    Attributes:
        loaded: what a load has given it.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._state: dict[str, Any] = state if isinstance(state, dict) else dict(state or {})
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Filled(Given):
    """A nested state dict whose tensors a load fills in place. Its keys must match the saved ones."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Do nothing: the tensors exist already."""


def loads_by_own_code(module: torch.nn.Module, *, beside_torch: bool = False) -> bool:
    """Whether code of a module's classes, or hooks, take part in its `load_state_dict`.

    Args:
        beside_torch: other code than torch's own, whose hooks prepare modules of FSDP and whose classes fill in what old files lack.
    """
    for child in module.modules():
        hooks = (*child._load_state_dict_pre_hooks.values(), *child._load_state_dict_post_hooks.values())
        found = [getattr(hook, "hook", hook) for hook in hooks]
        kind = type(child)
        for name in ("load_state_dict", "_load_from_state_dict"):
            if (own := getattr(kind, name)) is not getattr(torch.nn.Module, name):
                found.append(own)
        if any(not (beside_torch and str(getattr(code, "__module__", "")).startswith("torch.")) for code in found):
            return True
    return False


def as_stateful(stateful: Any) -> Stateful:
    """Wrap a bare module or optimizer, to save its state by name and load it in place."""
    if isinstance(stateful, torch.nn.Module):
        return ModelState(stateful)
    if isinstance(stateful, torch.optim.Optimizer):
        return OptimizerState(stateful)
    wrapped: Stateful = stateful
    return wrapped


def _same_memory(current: Any, loaded: Any) -> bool:
    mine, theirs = current, loaded
    if not type(mine) is type(theirs) is torch.Tensor:
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return False
        if is_wrapper(mine) and is_wrapper(theirs):
            (made, own), (made_of_loaded, parts) = parts_of(mine, ""), parts_of(theirs, "")
            return made == made_of_loaded and all(_same_memory(part, parts[name]) for name, part in own.items())
        mine, theirs = local_tensor(mine), local_tensor(theirs)
    return (
        mine.data_ptr() == theirs.data_ptr()
        and mine.dtype == theirs.dtype
        and mine.shape == theirs.shape
        and mine.stride() == theirs.stride()
    )


