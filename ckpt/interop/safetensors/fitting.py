"""Fit the tensors of a checkpoint to the `config.json` of their model, and it to them, for an export that `from_pretrained` reads.

Each step takes a selection and returns one. It reads no tensor, but for two that may be equal copies. Names lose the parts of wrappers:
these are the tensors of the trained model. Then the vocabulary is cut to `vocab_size`, and tied weights are there once: these are exported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt.errors import Argument, ConfigurationError
from ckpt.format.dtypes import raw_bytes
from ckpt.interop.opened import PIECE_BYTES, OpenedTensor, slabs
from ckpt.interop.safetensors.writing import Selection
from ckpt.ranks.topology import Topology
from ckpt.state.wrappers import ATTRIBUTES

OTHER_CONFIG = Argument("config_from", "<folder>")
_EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings|shared)\.weight")
_OUTPUT = re.compile(r"(.+\.)?(lm_head|embed_out|predictions(\.decoder)?)\.(weight|bias)")
"""Names in transformers of the tensors that have a row for each token."""
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Fitted:
    """Equal on all ranks.

    Attributes:
        trained: the tensors of the model as it was trained.
        exported: those that the config describes.
        config: of the exported ones.
        changed: what was changed, in words.
    """

    trained: Selection
    exported: Selection
    config: dict[str, Any]
    changed: list[str]


def fitted(selection: Selection, config: Mapping[str, Any], topology: Topology) -> Fitted:
    """Collective; the lead reads two tensors if they may be equal copies of one.

    Args:
        config: as in `config.json`.

    Raises:
        ConfigurationError: the vocabulary of the config is larger than that of the tensors.
    """
    trained, exported = unwrapped(selection), selection
    with topology.phase("fit") as phase:
        exported = unpadded(trained, vocab_size(config))
        if topology.is_lead:
            phase.from_lead = _is_tied(exported, config)
    if phase.from_lead:
        exported = _tied_once(exported)
    changes = dict(_changes(exported, config, phase.from_lead))
    changed = [
        f"{old}: called {new}, without the names of wrappers"
        for old, new in zip(_names(selection), _names(trained), strict=True)
        if old != new
    ]
    changed += [
        f"{name}: without its rows {tensor.entry.shape[0]} to {trained.tensors[name].entry.shape[0] - 1}, beyond vocab_size"
        for name, tensor in exported.tensors.items()
        if name in trained.tensors and tensor.entry.shape != trained.tensors[name].entry.shape
    ]
    changed += [f"config.json: {key} is {value}, as of the tensors" for key, value in changes.items()]
    return Fitted(trained, exported, {**config, **changes}, changed)


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens; None: the config does not say it."""
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def rows_of_vocabulary(selection: Selection) -> int | None:
    """Return the number of rows of the embedding, or of the output layer where the embedding is a second name; None: neither is known."""
    names = [name for kind in (_EMBEDDING, _OUTPUT) for name in selection.tensors if kind.fullmatch(name)]
    return next((shape[0] for name in names if (shape := selection.tensors[name].entry.shape)), None)


def unwrapped(selection: Selection) -> Selection:
    """Leave out what wrappers add to names: `_orig_mod.` anywhere, `module.` before all of them."""
    new = {name: ".".join(part for part in name.split(".") if part not in ATTRIBUTES - {"module"}) for name in _names(selection)}
    while all(name.startswith("module.") for name in new.values()):
        new = {old: name.removeprefix("module.") for old, name in new.items()}
    if len({*new.values()}) < len(new):  # they are no wrappers
        return selection
    tensors = {new[name]: tensor for name, tensor in selection.tensors.items()}
    return replace(selection, tensors=tensors, aliases={new[alias]: new[first] for alias, first in selection.aliases.items()})


def unpadded(selection: Selection, num_tokens: int | None) -> Selection:
    """Cut the embedding, and what else has a row for each of its rows, to this number of them; None: leave them.

    Raises:
        ConfigurationError: it has fewer.
    """
    rows = rows_of_vocabulary(selection)
    if num_tokens is None or rows is None or rows == num_tokens:
        return selection
    if rows < num_tokens:
        raise ConfigurationError(
            f"config.json is not that of these tensors: its vocab_size is {num_tokens}, and the embedding has {rows} rows; give the "
            "config of the model that was trained, by ",
            OTHER_CONFIG,
        )
    tensors = dict(selection.tensors)
    for name, tensor in selection.tensors.items():
        if (_EMBEDDING.fullmatch(name) or _OUTPUT.fullmatch(name)) and tensor.entry.shape[:1] == (rows,):
            tensors[name] = tensor._replace(entry=replace(tensor.entry, shape=(num_tokens, *tensor.entry.shape[1:])))
    return replace(selection, tensors=tensors)


def _names(selection: Selection) -> list[str]:
    return [*selection.tensors, *selection.aliases]


def tensor_with_tokens(names: Iterable[str], *, is_output: bool = False) -> str | None:
    """Return the name of the embedding, or of the output layer; None: it is not there."""
    return next((name for name in names if name.endswith(".weight") and (_OUTPUT if is_output else _EMBEDDING).fullmatch(name)), None)


def _ends(selection: Selection) -> tuple[str, str] | None:
    """Return the names of embedding and output layer, if there are both."""
    first, last = (tensor_with_tokens(_names(selection), is_output=is_output) for is_output in (False, True))
    return None if first is None or last is None else (first, last)


def _is_tied(selection: Selection, config: Mapping[str, Any]) -> bool | None:
    """Whether embedding and output layer are one tensor, or equal copies where the config does not deny it; None: one is not there."""
    if (ends := _ends(selection)) is None:
        return None
    first, last = (selection.aliases.get(name, name) for name in ends)
    is_denied = config.get("tie_word_embeddings") is False
    return first == last or (not is_denied and _same_bits(selection.tensors[first], selection.tensors[last]))


def _same_bits(one: OpenedTensor, other: OpenedTensor) -> bool:
    if (one.entry.dtype, one.entry.shape) != (other.entry.dtype, other.entry.shape):
        return False
    boxes = slabs(one.entry, PIECE_BYTES)
    return all(torch.equal(raw_bytes(one.read(box)), raw_bytes(other.read(box))) for box in boxes)


def _tied_once(selection: Selection) -> Selection:
    """Keep the tied tensor under the name of the embedding, which all readers look for."""
    ends = _ends(selection)
    assert ends is not None, "they are tied"
    first, last = ends
    stored = selection.aliases.get(first, first)
    kept = {name: tensor for name, tensor in selection.tensors.items() if name == stored or name != last}
    kept = {first if name == stored else name: tensor for name, tensor in kept.items()}
    others = {alias: first if of in (stored, last) else of for alias, of in selection.aliases.items() if alias != first}
    return replace(selection, tensors=kept, aliases={**others, last: first})


def _changes(selection: Selection, config: Mapping[str, Any], is_tied: bool | None) -> Iterator[tuple[str, Any]]:
    """Yield key and value of what the config does not say of the tensors, or says otherwise."""
    if is_tied is not None and config.get("tie_word_embeddings") is not is_tied:
        yield "tie_word_embeddings", is_tied
    sizes: Counter[str] = Counter()
    for tensor in selection.tensors.values():
        sizes[tensor.entry.dtype] += tensor.entry.num_bytes
    dtype = max(sizes, key=sizes.__getitem__)
    if dtype not in FLOATS or "quantization_config" in config:
        return
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    yield from ((key, dtype) for key in keys if config.get(key) != dtype)
