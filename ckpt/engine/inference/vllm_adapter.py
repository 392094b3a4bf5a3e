"""An adapter (LoRA) that the workers of a vLLM server receive without the model below it.

vLLM drops adapters from its workers' memory at will, all of them at each `finish_weight_update`, and reads one again, when a request names
it, from the folder that it was loaded from. That folder has a link to memory of the last worker, which the system frees when it ends.

Source: PEFT's folders; vLLM's `vllm.lora`, version 0.32.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from ckpt.engine.base import NamedTensor
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import ConfigurationError, MissingStateError

_TRIED = 2**31 - 1
"""Number of an adapter that no request has; vLLM counts from 1."""


class ServedAdapter:
    """One worker's end of the updates of an adapter. The process keeps one for each name, for vLLM does not forget where an adapter lies.

    Args:
        name: under which requests ask for it.
        model: of the worker.
        vllm_config: of the server.

    Raises:
        ConfigurationError: the server was not started for adapters, or has its workers on several hosts.
    """

    def __init__(self, name: str, model: Any, vllm_config: Any) -> None:
        if not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING or getattr(model, "lora_manager", None) is None:
            raise ConfigurationError(
                "this server takes no adapters: start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            )
        if vllm_config.parallel_config.nnodes > 1:
            raise ConfigurationError("this server's workers are on several hosts: an adapter alone goes to servers of one host")
        self.name = name
        self._model = model
        self._vllm_config = vllm_config
        self._config: dict[str, Any] = {}
        self._tensors: dict[str, Any] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._memory: int | None = None

    @property
    def folder(self) -> str:
        """Where vLLM finds the version that is served, for all workers of the server; the last one asks for it."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ckpt-adapter-")
        return self._folder.name

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Take the trainers' `adapter_config.json`.

        Raises:
            ConfigurationError: vLLM cannot serve it, or its rank is above the server's `--max-lora-rank`.
        """
        try:
            self._peft(config).validate_legal(self._vllm_config.lora_config)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the adapter {self.name} does not fit this server: {error}") from error
        self._config = dict(config)

    def check(self, layout: WeightLayout) -> None:
        """Raise if the served model has no such modules, or other sizes. Called before a byte moves; see `Sink.check`.

        Raises:
            MissingStateError: names one.
        """
        manager, peft = self._model.lora_manager, self._peft(self._config)
        layers = {part: manager.modules[packed] for packed, parts in manager.packed_modules.items() for part in parts} | manager.modules
        is_whole = self._vllm_config.parallel_config.pipeline_parallel_size == 1
        for name, _, shape, _ in layout.weights:
            module, is_lora_a = parse_fine_tuned_lora_name(name, self._mapper())
            if ".experts" in module:  # vLLM packs them anew
                continue
            layer = getattr(layers.get(module), "base_layer", None)
            if layer is None and is_whole:
                raise MissingStateError(f"{name}: the served model takes no adapter for {module}")
            rank, _ = peft.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
            size = getattr(layer, "input_size", None)
            fits = shape[0] == rank and size in (None, shape[1]) if is_lora_a else shape[1] == rank
            if not fits:
                there = f"[{rank}, {size or '...'}]" if is_lora_a else f"[..., {rank}]"
                raise MissingStateError(f"{name} has shape {list(shape)}: the served model and the adapter's config ask for {there}")

    def load(self, weights: Iterable[NamedTensor]) -> None:
        """Have vLLM load it once, so that what is wrong comes up now; keep it until `keep`."""
        manager, tensors = self._model.lora_manager, {name: tensor.clone() for name, tensor in weights}
        made = LoRAModel.from_lora_tensors(
            _TRIED,
            {name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales them in place
            self._peft(self._config),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=self._mapper(),
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )
        manager.remove_all_adapters()  # no request runs, and those that wait read theirs again
        try:
            manager.add_adapter(made)
            manager.activate_adapter(_TRIED)
        finally:
            manager.remove_all_adapters()
        self._tensors = tensors

    def keep(self) -> None:
        """Put the version that all have loaded where vLLM reads it. Called on the last worker; the server is paused."""
        from safetensors.torch import save

        tensors, self._tensors = self._tensors, None
        if tensors is None or self._folder is None:
            return
        folder = Path(self._folder.name)
        (folder / "adapter_config.json").write_text(json.dumps(self._config))
        before, self._memory = self._memory, os.memfd_create(self.name)
        with open(self._memory, "wb", closefd=False) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        beside = folder / "beside"
        beside.symlink_to(f"/proc/{os.getpid()}/fd/{self._memory}")
        beside.rename(folder / "adapter_model.safetensors")
        if before is not None:
            os.close(before)

    def forget(self) -> None:
        """Drop a version that has not been kept."""
        self._tensors = None

    def _peft(self, config: Mapping[str, Any]) -> Any:
        return PEFTHelper.from_dict(dict(config))

    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return mapper and mapper.get_rename_mapper()
