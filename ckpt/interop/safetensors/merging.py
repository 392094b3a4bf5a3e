"""Merge an adapter of PEFT's LoRA into its base, box by box while it is exported, with the arithmetic of PEFT's `merge_and_unload`.

Names, shapes and types are settled, and refused, before a tensor is read. `modules_to_save` take the place of the base's tensors.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ckpt.errors import Argument, ConfigurationError
from ckpt.format.box import Box
from ckpt.format.places import Place
from ckpt.format.strict_json import fit, parse
from ckpt.interop.opened import PIECE_BYTES, OpenedTensor, Piece, read_pieces, share_of, slabs
from ckpt.interop.safetensors.fitting import FLOATS, tensor_with_tokens
from ckpt.interop.safetensors.writing import Selection
from ckpt.loading.report import some_of
from ckpt.loading.strategy import ReadRequest, ReadStats
from ckpt.planning.plan import Address
from ckpt.ranks.topology import Topology
from ckpt.state.adapters import CONFIG_NAME
from ckpt.state.state_digest import digest_of_boxes

ASKED = Argument("merge_adapters", True)
OTHER_BASE = Argument("base_from", "<folder>")
_ABOVE = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Options of LoRA that are used here, or do not change what its tensors mean. Others, as `use_dora`, are refused if set."""
_REPEATS = "*+?{"
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""


@dataclass(frozen=True)
class AdapterConfig:
    """What is needed of `adapter_config.json`, and its text."""

    text: str
    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    init_lora_weights: Any = True
    base_model_name_or_path: str | None = None

    @classmethod
    def of(cls, text: str) -> AdapterConfig:
        """Parse the file.

        Raises:
            ConfigurationError: it is not that of a plain LoRA.
            CorruptCheckpointError: it is no such file.
        """
        options = fit(parse(text, CONFIG_NAME), dict[str, Any], CONFIG_NAME)
        odd = [f"{name}={value}" for name, value in options.items() if value and name not in _HARMLESS]
        if options.get("peft_type") != "LORA" or options.get("bias", "none") != "none":
            odd = [f"peft_type={options.get('peft_type')}", f"bias={options.get('bias')}"]
        if odd:
            raise ConfigurationError(ASKED, f" is for plain LoRA, and the adapter has {', '.join(odd):.200}; merge it with PEFT")
        known = {name: value for name, value in options.items() if name in cls.__dataclass_fields__ and value is not None}
        return fit(known | {"text": text}, cls, CONFIG_NAME)

    @property
    def keeps_base(self) -> bool:
        """Whether the adapter was begun without a change of the base, so that the base's folder is the one that was trained on."""
        return self.init_lora_weights in _KEEP_BASE

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return rank and scale of the adapter at a module, as PEFT finds them.

        Raises:
            ConfigurationError: a pattern is no regular expression, or could take for ever, or the rank is none.
        """
        if odd := [key for key in (*self.rank_pattern, *self.alpha_pattern) if _may_be_slow(key)]:
            raise ConfigurationError(ASKED, f": {CONFIG_NAME} has a pattern with many repetitions, {odd[0]:.80}; merge it with PEFT")
        try:
            r, alpha = (
                next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
                for patterns, default in ((self.rank_pattern, self.r), (self.alpha_pattern, self.lora_alpha))
            )
            return int(r), alpha / (math.sqrt(r) if self.use_rslora else r)
        except (re.error, ValueError, ZeroDivisionError) as error:
            raise ConfigurationError(f"{CONFIG_NAME} has no rank and scale for {module}: {error}") from error


def _may_be_slow(pattern: str) -> bool:
    """Whether a regular expression has more than two repetitions, or a repeated group: a stranger's could take for ever."""
    return sum(map(pattern.count, _REPEATS)) > 2 or any(f"){repeat}" in pattern for repeat in _REPEATS)


class _Delta(NamedTuple):
    """What the adapter adds to a tensor."""

    a: OpenedTensor
    b: OpenedTensor
    scale: float
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = (self.b.entry.shape[0], self.a.entry.shape[1])
        return shape[::-1] if self.is_transposed else shape

    def read(self, box: Box) -> torch.Tensor:
        step = -1 if self.is_transposed else 1
        (row, column), (rows, columns), rank = box.offsets[::step], box.shape[::step], self.a.entry.shape[0]
        a, b = self.a.read(Box((0, column), (rank, columns))), self.b.read(Box((row, 0), (rows, rank)))
        dtype = b.dtype
        if dtype in (torch.float16, torch.bfloat16):  # as PEFT does on a CPU
            a, b = a.float(), b.float()
        product = b @ a
        return ((product.T if self.is_transposed else product) * self.scale).to(dtype)


class _Values(NamedTuple):
    """Tensors that are computed from others, box by box. See `Readable`.

    Attributes:
        parts: name -> tensor, which is converted to the type of what it is read into, and what is added to it.
    """

    parts: Mapping[str, tuple[OpenedTensor, _Delta | None]]

    def prepare(self, requests: Sequence[ReadRequest]) -> _Computed:
        return _Computed(self.parts, requests)


class _Computed(NamedTuple):
    """See `Reading`."""

    parts: Mapping[str, tuple[OpenedTensor, _Delta | None]]
    requests: Sequence[ReadRequest]

    def run(self) -> ReadStats:
        for request in self.requests:
            tensor, delta = self.parts[request.name]
            found = tensor.read(request.box)
            request.out.copy_(found if delta is None else found.add_(delta.read(request.box)))
        return ReadStats(0, 0)

    def close(self) -> None:
        """Do nothing: each box is read and closed by itself."""


def of_type(selection: Selection, dtype: str) -> Selection:
    """Return the same tensors, of which those of another floating-point type are converted to this one when they are read."""
    values = _Values({name: (tensor, None) for name, tensor in selection.tensors.items()})
    entries = {name: tensor.entry for name, tensor in selection.tensors.items()}
    entries |= {name: replace(entry, dtype=dtype) for name, entry in entries.items() if entry.dtype in FLOATS}
    return Selection(values, {name: OpenedTensor(values, name, entry) for name, entry in entries.items()}, selection.aliases)


def trained_on(base: Selection, digest: str, folder: Place, topology: Topology) -> tuple[Selection, str | None]:
    """Return the base in the type that it had in training, and that type if the folder has another. Collective; reads all of it.

    Args:
        digest: that the checkpoint holds of it.

    Raises:
        ConfigurationError: it is another base.
    """
    own = {tensor.entry.dtype for tensor in base.tensors.values()} & FLOATS
    tried: dict[str | None, Selection] = {None: base} | {dtype: of_type(base, dtype) for dtype in sorted(FLOATS) if own != {dtype}}
    found = ""
    for dtype, selection in tried.items():
        now = _digest(selection, topology)
        if now == digest:
            return selection, dtype
        found = found or now
    raise ConfigurationError(
        f"the adapter was trained on another base (digest {digest:.12}) than {folder} (digest {found:.12}), whose tensors are "
        f"{' and '.join(sorted(own)) or 'no numbers'}, and in no other type those of the base; give ",
        OTHER_BASE,
    )


def _digest(base: Selection, topology: Topology) -> str:
    pieces = [Piece(name, box, tensor.entry.dtype) for name, tensor in base.tensors.items() for box in slabs(tensor.entry, PIECE_BYTES)]
    mine = share_of(pieces, [piece.num_bytes for piece in pieces], topology)
    boxes = (
        (Address(f"base.{piece.name}", piece.dtype, base.tensors[piece.name].entry.shape, piece.box), tensor)
        for piece, tensor in read_pieces(base.source, mine, base.tensors)
    )
    return digest_of_boxes(boxes, topology)


@dataclass(frozen=True, slots=True)
class Merging:
    """Equal on all ranks.

    Attributes:
        base: with its output layer, where the adapter has one and it is tied.
        adapter: its tensors, by the names in PEFT's file.
        merged: the tensors of the whole model.
    """

    base: Selection
    adapter: Mapping[str, OpenedTensor]
    config: AdapterConfig
    merged: Selection


def merging(base: Selection, adapter: Selection, config: AdapterConfig) -> Merging:
    """Settle what each tensor of the merged model is made of. Reads no tensor.

    A tied tensor of which the adapter changes one name is not tied any more: training has seen it so.

    Raises:
        ConfigurationError: the adapter has something else than matrices of LoRA and whole tensors, or does not fit the base.
    """
    given = _every(adapter)
    factors: dict[str, dict[str, OpenedTensor]] = defaultdict(dict)
    whole: dict[str, OpenedTensor] = {}
    for name, tensor in given.items():
        below = name.removeprefix(_ABOVE)
        if (match := _FACTOR.fullmatch(below)) is not None:
            factors[f"{match[1]}.weight"][match[2]] = tensor
        elif below == name or ".lora_" in below:
            raise ConfigurationError(ASKED, f" is for plain LoRA, and the adapter has {name}; merge it with PEFT")
        else:
            whole[below.replace(".base_layer.", ".")] = tensor
    base = _with_output(base, {*factors, *whole})
    every = _every(base)
    missing = sorted({*factors, *whole} - every.keys())
    if missing:
        raise _unfit(f"the base has no {some_of(missing)}")
    for name, tensor in whole.items():
        if tensor.entry.shape != every[name].entry.shape:
            raise _unfit(f"{name} is {tensor.entry.shape} in the adapter and {every[name].entry.shape} in the base")
    below_all = {**every, **whole}
    is_conv1d = config.fan_in_fan_out or _has_conv1d(every)
    deltas = {name: _delta(name, below_all[name], pair, config, is_conv1d=is_conv1d) for name, pair in factors.items()}
    values = _Values({name: (tensor, deltas.get(name)) for name, tensor in below_all.items()})
    kept: dict[str, str] = {}
    aliases = {}
    for name in every:
        first = name if name in deltas or name in whole else kept.setdefault(base.aliases.get(name, name), name)
        if first != name:
            aliases[name] = first
    tensors = {name: OpenedTensor(values, name, below_all[name].entry) for name in every if name not in aliases}
    return Merging(base, given, config, Selection(values, tensors, aliases))


def _delta(name: str, below: OpenedTensor, pair: Mapping[str, OpenedTensor], kind: AdapterConfig, *, is_conv1d: bool) -> _Delta:
    """Return what is added to the tensor `below`.

    Raises:
        ConfigurationError: the matrices do not fit it.
    """
    rank, scale = kind.rank_and_scale(name.removesuffix(".weight"))
    if pair.keys() != {"A", "B"}:
        raise _unfit(f"of {name} the adapter has {next(iter(pair))} alone")
    (a, b), shape = (pair["A"], pair["B"]), below.entry.shape
    fit_together = len(a.entry.shape) == len(b.entry.shape) == len(shape) == 2 and a.entry.shape[0] == b.entry.shape[1] == rank
    is_embedding = ".lora_embedding_" in a.name
    delta = _Delta(a, b, scale, is_transposed=False)
    if fit_together and (delta.shape != shape or (shape[0] == shape[1] and (is_conv1d or is_embedding))):
        delta = delta._replace(is_transposed=True)
    if not fit_together or delta.shape != shape:
        raise _unfit(f"{name} is {shape} in the base, and the adapter of rank {rank} has {a.entry.shape} and {b.entry.shape} for it")
    dtypes = {a.entry.dtype, b.entry.dtype}
    if len(dtypes) > 1 or not dtypes | {below.entry.dtype} <= FLOATS:
        raise _unfit(f"{name} is {below.entry.dtype} in the base, and {' and '.join(sorted(dtypes))} in the adapter")
    return delta


def _unfit(why: str) -> ConfigurationError:
    return ConfigurationError(f"the adapter does not fit the base: {why}; give the base that it was trained on, by ", OTHER_BASE)


def _every(selection: Selection) -> dict[str, OpenedTensor]:
    return {**selection.tensors, **{alias: selection.tensors[first] for alias, first in selection.aliases.items()}}


def _with_output(base: Selection, changed: set[str]) -> Selection:
    """Add the output layer that the adapter changes, where the base holds it under the name of the embedding alone.

    Raises:
        ConfigurationError: the adapter changes the embedding, and the base may have an output layer that is tied to it.
    """
    every = _every(base)
    if tensor_with_tokens(every, is_output=True) is not None or (embedding := tensor_with_tokens(every)) is None:
        return base
    if (output := tensor_with_tokens(sorted(changed), is_output=True)) is not None:
        return replace(base, aliases={**base.aliases, output: base.aliases.get(embedding, embedding)})
    if embedding in changed:
        raise ConfigurationError(
            f"the adapter changes {embedding}, to which an output layer may be tied that the base's files do not hold; save the base with ",
            Argument("peft_base", "saved"),
        )
    return base


def _has_conv1d(every: Mapping[str, OpenedTensor]) -> bool:
    """Whether matrices are stored as in GPT-2, inputs first: its biases say so, where the config says it of the last layer alone."""
    shapes = {name.removesuffix(".weight"): tensor.entry.shape for name, tensor in every.items() if name.endswith(".weight")}
    biases = {name: every[f"{name}.bias"].entry.shape for name in shapes if f"{name}.bias" in every}
    return any(len(shapes[name]) == 2 and shapes[name][0] != shapes[name][1] and bias == shapes[name][1:] for name, bias in biases.items())
