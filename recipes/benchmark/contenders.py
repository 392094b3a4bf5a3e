"""The contenders of measure=saves by name, ours, peers and limits; and our coordinator as one of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from ckpt import CheckpointCoordinator
from ckpt.errors import ConfigurationError
from recipes.benchmark.adapters import ADAPTER, Pretrained
from recipes.benchmark.harness import EXTRA
from recipes.benchmark.limits import Broadcast, Memcpy, Raw, RawDirect, takes_direct_writes
from recipes.benchmark.measuring import gathered
from recipes.benchmark.peers import Dcp, Safetensors, TorchCheckpointing
from recipes.benchmark.places import first, least_loaded
from recipes.benchmark.slow_store import TokenBucket, slow_reads
from recipes.benchmark.workloads import Contender, State, Workload
from recipes.support.config import config_text, made

BACKENDS: dict[str, dict[str, Any]] = {
    "zarr": {"_target_": "ckpt.backends.zarr.ZarrBackend"},
    "tensorstore": {"_target_": "ckpt.backends.tensorstore.TensorStoreBackend", "kvstore": "ocdbt"},
    "tensorstore-file": {"_target_": "ckpt.backends.tensorstore.TensorStoreBackend", "kvstore": "file"},
    "kimi-engine": {"_target_": "ckpt.backends.kimi_engine.KimiEngineBackend", "pool": True},
    "kimi-engine-disk": {"_target_": "ckpt.backends.kimi_engine.KimiEngineBackend", "pool": False},
}
"""Nodes as in conf/ckpt. The last backend keeps nothing of a save in host memory, so loads read the files."""

STRATEGIES = {
    "direct": {"_target_": "ckpt.loading.direct.DirectLoad"},
    "two-stage": {"_target_": "ckpt.loading.two_stage.two_stage.TwoStageLoad"},
}
OURS = {
    f"{backend}{suffix}": (backend, suffix[1:] or "direct") for backend in BACKENDS for suffix in ("", *(f"/{name}" for name in STRATEGIES))
}
"""Backend and strategy, by the contender's name."""

PEERS: dict[str, Callable[[Workload], Contender]] = {
    "dcp": Dcp,
    "dcp-zarr": partial(Dcp, format="zarr"),
    "torch-checkpointing": TorchCheckpointing,
    "pretrained": Pretrained,
    "safetensors": partial(Safetensors, choose=least_loaded),
    "safetensors-one-file": partial(Safetensors, choose=first),
}
LIMITS: dict[str, Callable[[Workload], Contender]] = {"raw": Raw, "raw-direct": RawDirect, "memcpy": Memcpy, "broadcast": Broadcast}
RAW = ("raw", "raw-direct")

_ON_HOST = (*RAW, "memcpy")
_OF_SAFETENSORS = ("safetensors", "kimi-engine")


class Ours(Contender):
    """The coordinator with one of our backends and strategies: all components, digests computed and checked.

    Args:
        is_slow: bytes are read through a store of a given speed; only that speed counts, so one load tells.
    """

    def __init__(self, saving: CheckpointCoordinator, loading: CheckpointCoordinator, *, is_slow: bool) -> None:
        self._saving = saving
        self._loading = loading
        if is_slow:
            self.measures = ("save", "load_warm")

    def save(self, folder: Path) -> None:
        self._saving.save_checkpoint(folder / "checkpoint-1")

    def load(self, folder: Path) -> dict[str, int]:
        self._loading.load_checkpoint(folder / "checkpoint-1")
        report = self._loading.last_load
        assert report is not None
        return {"bytes_read": report.bytes_read, "bytes_needed": report.bytes_needed}


def contenders_of(
    cfg: Mapping[str, Any], workload: Workload, scratch: Path
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Make the contenders that `benchmark.contenders` names and that can take part here; return why others cannot. Collective.

    Args:
        scratch: a folder on the file system that is measured.
    """
    topology = workload.saved.topology
    names = cfg["benchmark"]["contenders"]
    mine = {name: reason for name in names if (reason := _obstacle(name, workload, scratch))}
    left_out = {name: reason for reasons in gathered(mine, topology) for name, reason in reasons.items()}
    taking_part = [name for name in names if name not in left_out]
    if not taking_part:
        raise ConfigurationError("; ".join(f"{name} cannot take part: {reason}" for name, reason in left_out.items()))
    if cfg["benchmark"]["store_mib_s"] is not None and len(topology.nodes) > 1:
        raise ConfigurationError(
            "benchmark.store_mib_s plays a shared store for the ranks of one host, and these are on "
            f"{len(topology.nodes)}: measure the store that they share with workload=gpt2_ddp"
        )
    return {name: _made(name, cfg, workload, scratch) for name in taking_part}, left_out


def coordinator_of(cfg: Mapping[str, Any], state: State, **given: Any) -> CheckpointCoordinator:
    """Make the coordinator of the recipe for a state, some of its arguments given. Collective over the state's ranks."""
    held = {"state_components": state.components, "process_groups": state.process_groups, "topology": state.topology}
    coordinator: CheckpointCoordinator = instantiate(cfg["coordinator"])(
        **held, overwrite=False, config_text=config_text(cfg), **given
    )
    return coordinator


def _obstacle(name: str, workload: Workload, scratch: Path) -> str:
    """Return why a contender cannot take part here, or ""."""
    if name.startswith(_OF_SAFETENSORS) and importlib.util.find_spec("safetensors") is None:
        return f"the package safetensors is not installed: {EXTRA}"
    if name == "torch-checkpointing" and importlib.util.find_spec("torch_checkpointing") is None:
        return "the package torch_checkpointing is not installed: pip install -e '.[torch-checkpointing]'"
    if name == "torch-checkpointing" and workload.num_loading != workload.saved.topology.world_size:
        return "its ranks exchange what a load on others needs between accelerators alone, so that it is measured on the ranks that saved"
    if name == "pretrained" and ADAPTER not in workload.saved.statefuls:
        return "it saves an adapter of PEFT, which workload=lora has"
    device = workload.saved.device.torch_device.type
    if name in _ON_HOST and device != "cpu":
        return f"it knows host memory only, and the state is on {device}"
    if name == "raw-direct" and not takes_direct_writes(scratch, workload.saved.topology.rank):
        return "the file system does not take O_DIRECT"
    if name == "broadcast" and workload.num_loading == 1:
        return "one rank has nobody to send to"
    return ""


def _made(name: str, cfg: Mapping[str, Any], workload: Workload, scratch: Path) -> Contender:
    if name not in OURS:
        return (PEERS | LIMITS)[name](workload)
    rate = cfg["benchmark"]["store_mib_s"]
    reads = {} if rate is None else {"read_at": slow_reads(TokenBucket(scratch / "bucket", rate * 2**20))}
    saving, loaded = _coordinator(name, cfg, workload.saved, reads), workload.loaded
    loading = saving if loaded is workload.saved or loaded is None else _coordinator(name, cfg, loaded, reads)
    return Ours(saving, loading, is_slow=rate is not None)


def _coordinator(name: str, cfg: Mapping[str, Any], state: State, reads: Mapping[str, Any]) -> CheckpointCoordinator:
    """Make one of ours; its strategy has the keys of `strategy=` on the command line if that is the same one."""
    backend, strategy = OURS[name]
    node = STRATEGIES[strategy]
    if cfg["strategy"]["_target_"] == node["_target_"]:
        node = cfg["strategy"]
    return coordinator_of(cfg, state, backend=made(BACKENDS[backend]), strategy=made(node, **reads))
