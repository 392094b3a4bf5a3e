"""The command `convert`: find out the format of `src`, and write it in the format `to`, on one rank or on several."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from rich.filesize import decimal

from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.registry import BACKENDS, backend_named
from ckpt.cli.arguments import LoadKeys, argued, argument
from ckpt.cli.converting_megatron import Converted, convert_megatron, described, sharded_parts
from ckpt.cli.copying import require_outside
from ckpt.cli.progress import progress_bar
from ckpt.cli.tables import counted, first_rows, more, most_rows, print_json
from ckpt.cli.tables import show as show_parts
from ckpt.errors import Argument, CheckpointNotFoundError, ConfigurationError, printable
from ckpt.format.manifest import MANIFEST_NAME, SHARDED, STATE
from ckpt.format.places import ObjectPath, Place, as_place, local_path
from ckpt.interop.importing import import_checkpoint
from ckpt.interop.megatron.zarr import is_megatron_zarr
from ckpt.interop.new_files import require_free
from ckpt.interop.opened import Opened
from ckpt.interop.other_source import OtherSource
from ckpt.interop.programs import PROGRAMS, format_at
from ckpt.interop.recognised import recognised
from ckpt.interop.registry import source_at
from ckpt.interop.rewriting import rewrite
from ckpt.interop.safetensors.fitting import OTHER_CONFIG, fitted, unwrapped
from ckpt.interop.safetensors.logits import ASKED, LOGITS, logits_check
from ckpt.interop.safetensors.merging import ASKED as MERGED
from ckpt.interop.safetensors.merging import OTHER_BASE, AdapterConfig, Merging, merging, trained_on
from ckpt.interop.safetensors.writing import (
    CONFIG_NAME,
    ModelFiles,
    Selection,
    adapter_config_in,
    export,
    model_files_in,
    model_files_of,
    select,
    select_of_megatron,
    select_of_other,
    values_beside,
)
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import CheckpointSource, CommittedSource
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.state.adapters import CONFIG, DIGEST, base_below
from ckpt.state.adapters import CONFIG_NAME as ADAPTER_CONFIG_NAME
from ckpt.storage.files import read_once
from ckpt.storage.metadata import maybe_load_config
from ckpt.storage.stored import checkpoints_below, noticing_removal, read_manifest_bytes

SAFETENSORS = "safetensors"
DCP = "dcp"
TORCH = "torch"
DESTINATIONS = (*BACKENDS, SAFETENSORS, DCP, TORCH)
"""The values of `to`."""
_OURS, _MEGATRON, _TORCH_DIST = "ours", "megatron zarr", "megatron"
_OF_SHARDED = ("zarr", "tensorstore")
"""The formats of a sharded state dict, which Megatron-Core's zarr checkpoints can become."""
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("", 1000), ("i", 1024))
}


@dataclass
class ConvertKeys:
    """The keys of the command."""

    src: str = argued("the old checkpoint")
    dst: str = argued("a folder for the new one")
    to: str = argued("the format of the new one", default="zarr", choices=DESTINATIONS)
    component: str | None = argued(f"to {SAFETENSORS}: the component, or none for everything", default="model")
    max_shard_size: str | None = argued(f"to {SAFETENSORS}: the size above which there are several files", default="5GB")
    config_from: str | None = argued(f"to {SAFETENSORS}: a folder of Hugging Face's, whose configs are copied", default=None)
    merge_adapters: bool = argued(f"to {SAFETENSORS}: write the whole model, with the adapter that is the component", default=False)
    base_from: str | None = argued("merge adapters: a folder of Hugging Face's with the base, which the checkpoint lacks", default=None)
    check: str | None = argued(f"to {SAFETENSORS}: compare what transformers loads with the trained model", default=None, choices=[LOGITS])
    load: LoadKeys = field(default_factory=LoadKeys)
    leave_out_unknown: bool = argued("leave out objects of classes that are not built here, and list them", default=False)
    all: bool = argued("list all values that were changed or left out, not the first twenty of each", default=False)
    json: bool = argued("print only JSON", default=False)

    def validate(self) -> None:
        """Raise ConfigurationError for a wrong value of a key, or one that is for another `to`."""
        if self.to not in DESTINATIONS:
            raise ConfigurationError(
                f"{argument('to', self.to)} is not known; choose {', '.join(BACKENDS)}, {SAFETENSORS}, {DCP} or {TORCH}"
            )
        shard_bytes(self.max_shard_size)
        if self.check not in (None, LOGITS):
            raise ConfigurationError(f"{argument('check', self.check)} is not known; choose {LOGITS}, or {argument('check', None)}")
        for name in ("config_from", "merge_adapters", "base_from", "check"):
            if (value := getattr(self, name)) and self.to != SAFETENSORS:
                raise ConfigurationError(f"{argument(name, value)} is for {argument('to', SAFETENSORS)}; leave it out")
        if self.base_from is not None and not self.merge_adapters:
            raise ConfigurationError(f"{argument('base_from', self.base_from)} is for {argument('merge_adapters')}; leave it out")
        if self.config_from is None:
            return
        given = argument("config_from", self.config_from)
        if CONFIG_NAME not in model_files_in(Path(self.config_from)).places:
            raise ConfigurationError(
                f"{given} has no config.json; give a folder that config.save_pretrained wrote, or a snapshot of Hugging Face's"
            )


def shard_bytes(size: str | None) -> int:
    """Return the bytes of `max_shard_size`, such as "5GB", which is 5 * 10**9, or "5GiB"; None: no limit.

    Raises:
        ConfigurationError: the text is no size.
    """
    if size is None:
        return 1 << 62
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", size)
    unit = next((unit for unit in _UNITS if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * _UNITS[unit] < 1:
        none = argument("max_shard_size", None)
        raise ConfigurationError(f"{argument('max_shard_size', size)}: expected a size such as 5GB or 500MiB, or {none} for one file")
    return int(float(match[1]) * _UNITS[unit])


def run_of(keys: ConvertKeys) -> dict[str, Any]:
    """Find out the format of `src`, and return what `convert_on_ranks` takes.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `src`.
        CheckpointExistsError: `dst` exists and is not empty.
    """
    src, dst = as_place(keys.src, "src"), as_place(keys.dst, "dst")
    if isinstance(dst, ObjectPath) and keys.to not in BACKENDS:
        raise ConfigurationError(f"{dst}: {argument('to', keys.to)} writes folders alone; give a path, or {_one_of(BACKENDS)}")
    source_format = _format_of(src)
    require_free(dst)
    require_outside(dst, src)
    return {"keys": asdict(keys), "format": source_format}


def _one_of(formats: Iterable[str]) -> str:
    return " or ".join(argument("to", name) for name in formats)


def convert_on_ranks(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Write the checkpoint at `src` in the format `to`, read it back, and then rename it to `dst`. Collective.

    Args:
        cfg: `run_of` the command's keys.

    Returns:
        the fields of `Converted`.

    Raises:
        ConfigurationError: `src` cannot be converted to that format, or holds pickles that are not allowed or not convertible.
        CheckpointGoneError: the old checkpoint was removed while it was read.
        CorruptCheckpointError: the old checkpoint is damaged or incomplete.
        StorageError: the bytes read back differ from those written.
    """
    keys = msgspec.convert(cfg["keys"], ConvertKeys)
    with noticing_removal(as_place(keys.src, "src")):
        return asdict(_converted(keys, cfg["format"], topology))


def _converted(keys: ConvertKeys, source_format: str, topology: Topology) -> Converted:
    """Choose how to convert, and do it."""
    is_zarr = source_format == _MEGATRON
    if (is_zarr and keys.to != SAFETENSORS) or (source_format == _TORCH_DIST and keys.to in BACKENDS):
        if keys.to not in _OF_SHARDED:
            raise ConfigurationError(
                f"{keys.src} is a sharded state dict of Megatron-Core's, which {argument('to', keys.to)} cannot hold: choose "
                f"{_one_of(_OF_SHARDED)}, or {argument('to', SAFETENSORS)} for the tensors alone"
            )
        options = {"allow_pickle": keys.load.allow_pickle, "leave_out_unknown": keys.leave_out_unknown}
        shown = partial(_shown, keys, topology, moves=2)  # mapped files are read without notice
        return convert_megatron(local_path(keys.src, "src"), local_path(keys.dst, "dst"), keys.to, topology, shown, **options)
    source = None if is_zarr else _opened(keys, topology)
    if keys.to == SAFETENSORS:
        return _export(keys, source, topology)
    assert source is not None, "a sharded state dict of the zarr strategy"
    return _on_ranks(keys, source, topology, _writer(keys, source, topology))


def show(found: Converted, keys: ConvertKeys) -> None:
    """Print what was converted, and what was left out."""
    if keys.json:
        places = {"src": keys.src, "dst": str(as_place(keys.dst, "dst")), "to": keys.to}
        print_json(places | found.held | {"num_files": found.num_files, "num_bytes": found.num_bytes})
        return
    files = counted(found.num_files, "file")
    first = (
        f"{keys.src} is now {as_place(keys.dst, 'dst')}, in {keys.to}; {files}, {decimal(found.num_bytes)}, read back and right"
    )
    listed: list[str] = []
    for name, what in {"changed": "changed ", "left_out": "left out"}.items():
        texts = found.held.get(name, [])
        shown = first_rows(texts, most=most_rows(all=keys.all))
        listed += [f"  {what} {text}" for text in shown]
        listed += [f"  {what} {line}" for line in more(len(texts) - len(shown), f"of {len(texts):,} value")]
    show_parts(first, *found.lines, *listed)


def _format_of(src: Place) -> str:
    """Return the format of the checkpoint at `src`.

    Raises:
        CheckpointNotFoundError: there is none that is known.
    """
    if not isinstance(src, Path):
        if (found := format_at(src)) is not None:
            return found
        read_manifest_bytes(src)
        return _OURS
    if not src.exists():
        raise CheckpointNotFoundError(f"{src} does not exist")
    if _is_checkpoint(src):
        return _OURS if (src / MANIFEST_NAME).is_file() else _MEGATRON
    if (found := format_at(src)) is not None:
        return found
    if (other := recognised(src)) is not None:
        raise CheckpointNotFoundError(other)
    below = sorted(path for path in src.iterdir() if _is_checkpoint(path)) if src.is_dir() else []
    below = below or checkpoints_below(src)[:1]
    hint = f"; below it there is {below[-1]}" if below else ""
    raise CheckpointNotFoundError(
        f"{src} is no checkpoint: it has neither a {MANIFEST_NAME}, as ours have, nor a metadata.json of Megatron-Core's zarr, nor "
        f"the files of another format that is known{hint}"
    )


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST_NAME).is_file() or is_megatron_zarr(path))


@contextmanager
def _shown(keys: ConvertKeys, topology: Topology, num_bytes: int, *, moves: int = 3) -> Iterator[None]:
    """Show the progress of the lead, which does a share like every rank.

    Args:
        moves: how often each byte moves: it is read, written, and read back.
    """
    if not topology.is_lead:
        yield
        return
    with progress_bar(f"{keys.to}: {printable(keys.dst)}", moves * num_bytes // topology.world_size) as advance:
        topology.on_progress = advance
        try:
            yield
        finally:
            topology.on_progress = None


def _opened(keys: ConvertKeys, topology: Topology) -> CheckpointSource:
    source = source_at(as_place(keys.src, "src"), topology, DirectLoad(read_at=read_once), allow_pickle=keys.load.allow_pickle)
    if isinstance(source, OtherSource):
        source.leaves_out_unknown = keys.leave_out_unknown or keys.to == SAFETENSORS
    return source


def _writer(keys: ConvertKeys, source: CheckpointSource, topology: Topology) -> Callable[[Any], object]:
    """Return what writes a checkpoint to a new place."""
    src = as_place(keys.src, "src")
    if keys.to == TORCH:
        return lambda dst: PROGRAMS[TORCH].write(source, dst, topology)
    if keys.to == DCP:
        parts = sharded_parts(src) if isinstance(src, Path) and _is_sharded(src, source) else None
        return lambda dst: PROGRAMS[DCP].write(source, dst, topology, sharded=parts)
    # The process ends after the conversion: kimi-engine keeps no memory for a next save.
    backend = KimiEngineBackend(pool=False) if keys.to == "kimi-engine" else backend_named(keys.to)
    if isinstance(source, CommittedSource):
        return lambda dst: rewrite(src, dst, backend, topology)
    return lambda dst: import_checkpoint(source, dst, topology, backend)


def _is_sharded(src: Path, source: CheckpointSource) -> bool:
    return isinstance(source, CommittedSource) and source.holds(SHARDED) and maybe_load_config(src) is not None


def _on_ranks(
    keys: ConvertKeys, source: CheckpointSource, topology: Topology, work: Callable[[Any], object]
) -> Converted:
    """Let every rank do its share of the work, and describe the result."""
    opened, dst = Opened(source), as_place(keys.dst, "dst")
    tensors = opened.every_tensor()
    array_bytes = sum(tensor.entry.num_bytes for tensor in tensors)
    with _shown(keys, topology, array_bytes):
        work(dst)
    components = Opened(source, by_component=True).keys
    held: dict[str, Any] = {"components": components, "arrays": len(tensors), "array_bytes": array_bytes}
    if isinstance(source, OtherSource) and source.left_out:
        held["left_out"] = source.left_out
    if as_bytes := _as_bytes(opened):
        held["changed"] = as_bytes
    lines = [f"  components {', '.join(components)}", f"  arrays     {len(tensors)}, {decimal(array_bytes)}"]
    if isinstance(source, CommittedSource) and source.manifest.removed:
        held["removed"] = source.manifest.removed
        lines.append(f"  without    {', '.join(held['removed'])}, which retention removed")
    return described(as_place(keys.dst, "dst"), topology, held, lines)


def _as_bytes(opened: Opened) -> list[str]:
    return [f"{name} {why}: its bytes alone, as uint8" for name, why in opened.bytes_alone().items()]


def _export(keys: ConvertKeys, source: CheckpointSource | None, topology: Topology) -> Converted:
    src, dst = as_place(keys.src, "src"), local_path(keys.dst, "dst")
    with topology.phase("select"):
        selection = _selected(source, src, keys.component, topology)
        values = values_beside(source, keys.component) if source is not None else []
        adapter = None if source is None else _adapter_config(keys, source, src)
        if adapter is not None and CONFIG in values:
            values.remove(CONFIG)
        if adapter is not None and keys.check is not None and not keys.merge_adapters:
            raise ConfigurationError(
                ASKED, f" compares whole models, and {keys.component} is an adapter; leave it out, or merge it with ", MERGED
            )
    changes, check, is_adapter = list[str](), None, adapter is not None and not keys.merge_adapters
    if is_adapter:
        assert adapter is not None, "is_adapter"
        beside: ModelFiles | None = ModelFiles(Path(), {}, {ADAPTER_CONFIG_NAME: adapter.encode()})
    else:
        whole = None
        if keys.merge_adapters:
            assert source is not None and adapter is not None, "_adapter_config"
            whole, changes = _merging(keys, source, selection, adapter, topology)
            selection = whole.merged
        selection, fitted_to, beside, check = _as_model(keys, source, selection, whole, topology)
        changes += fitted_to
    tensor_bytes = selection.num_bytes
    with _shown(keys, topology, tensor_bytes):
        done = export(
            selection, dst, shard_bytes(keys.max_shard_size), topology, beside=beside, check=check, is_adapter=is_adapter
        )
    left_out = [f"{alias} (tied: it is {first})" for alias, first in selection.aliases.items()]
    left_out += [f"{name} (no tensor)" for name in values]
    left_out += source.left_out if isinstance(source, OtherSource) else []
    changed = [
        *changes,
        *([] if source is None else _as_bytes(Opened(source))),
        *(f"{name}: called {theirs}, for the format cannot call it so" for name, theirs in done.renamed.items()),
        *(
            f"{name}: real numbers in a dimension more, for the format has no {dtype}"
            for name, dtype in done.as_pairs.items()
        ),
    ]
    held: dict[str, Any] = {
        "component": keys.component,
        "tensors": len(selection.tensors),
        "tensor_bytes": tensor_bytes,
    }
    held |= {"files": list(done.files), "left_out": left_out, "changed": changed}
    of = "of everything" if keys.component is None else f"of component {keys.component}"
    lines = [f"  tensors  {len(selection.tensors)}, {decimal(tensor_bytes)}, {of}"]
    if beside is not None and (copied := sorted({*beside.places, *beside.made})):
        held["copied"] = copied
        lines.append(f"  copied   {', '.join(copied)}")
        if CONFIG_NAME in copied and not any(name.startswith(("tokenizer", "vocab")) or name.endswith(".model") for name in copied):
            lines.append("  without  a tokenizer: there is none beside config.json")
    if keys.check is not None:
        held["checked"] = keys.check
        lines.append("  checked  the logits of the model that transformers loads are those of the trained one")
    return described(as_place(keys.dst, "dst"), topology, held, lines)


def _selected(source: CheckpointSource | None, src: Place, component: str | None, topology: Topology) -> Selection:
    if source is None:
        return select_of_megatron(local_path(src, "src"), component, topology)
    if isinstance(source, CommittedSource) and not source.holds(STATE):
        return select(source, src, component)
    return select_of_other(source, src, component)


def _adapter_config(keys: ConvertKeys, source: CheckpointSource, src: Place) -> str | None:
    """Return the text of adapter_config.json of what is exported, if it is an adapter.

    Raises:
        ConfigurationError: it is none, and is to be merged.
    """
    found = adapter_config_in(source, keys.component)
    if found is not None or not keys.merge_adapters:
        return found
    if isinstance(source, OtherSource) and isinstance(src, Path) and (data := model_files_in(src).read(ADAPTER_CONFIG_NAME)) is not None:
        return data.decode(errors="replace")
    raise ConfigurationError(f"{src} holds no adapter of PEFT as ", Argument("component", keys.component), ", which ", MERGED, " needs")


def _merging(
    keys: ConvertKeys, source: CheckpointSource, adapter: Selection, text: str, topology: Topology
) -> tuple[Merging, list[str]]:
    """Find the base of an adapter, and settle the merged tensors; and what was changed, in words. Collective.

    Raises:
        ConfigurationError: the base is missing, or another one than that of the training; the adapter is not plain LoRA, or does not fit.
    """
    with topology.phase("adapter"):
        opened, config = Opened(source, by_component=True), AdapterConfig.of(text)
        key = base_below(keys.component or "", opened.keys)
        digest, folder = opened.plain(key, "").get(DIGEST) if key is not None else None, _base_folder(keys, config)
        is_saved = key is not None and digest is None
        if is_saved and keys.base_from is not None:
            raise ConfigurationError(f"the checkpoint holds the base as {key}; leave out ", OTHER_BASE)
        if not is_saved and folder is None:
            raise ConfigurationError(f"the base {config.base_model_name_or_path or ''} is not in the checkpoint; give ", OTHER_BASE)
        if key is None and not config.keeps_base:
            raise ConfigurationError(
                f"init_lora_weights={config.init_lora_weights} changes the base, and {keys.src} does not know how; merge it with PEFT"
            )
    place: Place = as_place(keys.src, "src") if folder is None or is_saved else folder
    below = source if is_saved else source_at(place, topology, DirectLoad(read_at=read_once), allow_pickle=keys.load.allow_pickle)
    with topology.phase("base"):
        base = unwrapped(_selected(below, place, key if is_saved else "model", topology))
    dtype = None
    if not is_saved and isinstance(digest, str):
        base, dtype = trained_on(base, digest, place, topology)
    with topology.phase("merge"):
        changes = [] if dtype is None else [f"the base: {dtype}, as it was trained, and not as it is in {place}"]
        return merging(base, adapter, config), changes


def _base_folder(keys: ConvertKeys, config: AdapterConfig) -> Path | None:
    """Return the folder of Hugging Face's with the base of an adapter, if there is one."""
    name = keys.base_from or config.base_model_name_or_path
    return Path(name) if name and Path(name).is_dir() else None


def _as_model(
    keys: ConvertKeys, source: CheckpointSource | None, selection: Selection, whole: Merging | None, topology: Topology
) -> tuple[Selection, list[str], ModelFiles | None, Callable[[Path], None] | None]:
    """Fit what is exported to the model's config, if there is one: the tensors, what was changed, the files beside them, and the check.

    The last two are the lead's.
    """
    beside, check, changes = None, None, list[str]()
    with topology.phase("config") as phase:
        if topology.is_lead:
            beside = _beside(keys, source, whole)
            config = phase.from_lead = None if beside is None else beside.config
            if config is None and keys.check is not None:
                raise ConfigurationError(ASKED, " needs the model's config.json, which is not with the checkpoint; give ", OTHER_CONFIG)
    if phase.from_lead is not None:
        found = fitted(selection, phase.from_lead, topology)
        selection, changes = found.exported, found.changed
        with topology.phase("trained model"):
            if beside is not None and found.config != phase.from_lead:
                beside = beside.with_config(found.config)
            if topology.is_lead and keys.check is not None:
                with topology.moving():
                    check = logits_check(found, whole)
    return selection, changes, beside, check


def _beside(keys: ConvertKeys, source: CheckpointSource | None, whole: Merging | None) -> ModelFiles | None:
    """Find the files beside a model: in `config_from`, in the folder of Hugging Face's that is read, or in the checkpoint of a trainer.

    Of a model with a merged adapter they may be in the folder of the base.
    """
    src = as_place(keys.src, "src")
    if keys.config_from is not None:
        return model_files_in(Path(keys.config_from)).without(ADAPTER_CONFIG_NAME)
    if whole is not None:
        assert source is not None, "it holds the adapter"
        found, folder = model_files_of(source), _base_folder(keys, whole.config)
        has_config = found is not None and CONFIG_NAME in found.made
        found = found if has_config or folder is None else model_files_in(folder)
        return None if found is None else found.without(ADAPTER_CONFIG_NAME)  # transformers would look for its adapter
    if isinstance(source, OtherSource) and source.program == SAFETENSORS:
        return model_files_in(src) if isinstance(src, Path) and src.is_dir() else None
    return None if source is None or keys.component != "model" else model_files_of(source)


def convert(keys: ConvertKeys) -> None:
    """Convert on the ranks of torchrun, or on this process alone, and print the result on the lead."""
    with _ranks() as topology:
        with topology.phase("look") as phase:
            if topology.is_lead:
                phase.from_lead = run_of(keys)
        found = convert_on_ranks(phase.from_lead, topology)
        if topology.is_lead:
            show(Converted(**found), keys)


@contextmanager
def _ranks() -> Iterator[Topology]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with Topology.alone() as alone:
            yield alone
        return
    dist.init_process_group("gloo")
    try:
        yield current_topology()
    finally:
        dist.destroy_process_group()
