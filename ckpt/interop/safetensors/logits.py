"""Compare the logits of the model that transformers loads from an exported folder with those of the trained model. On one rank.

transformers is imported here alone, and PEFT, and only when it is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import Argument, ConfigurationError, import_failure, sentence
from ckpt.format.box import whole
from ckpt.interop.safetensors.fitting import OTHER_CONFIG, Fitted, rows_of_vocabulary, vocab_size
from ckpt.interop.safetensors.merging import Merging
from ckpt.interop.safetensors.writing import Selection
from ckpt.loading.report import some_of

LOGITS = "logits"
ASKED = Argument("check", LOGITS)
_NUM_TOKENS = 16


def logits_check(fitted: Fitted, merging: Merging | None = None) -> Callable[[Path], None]:
    """Compute the logits of the trained model, and return what compares them with those of the model in a folder.

    The trained model is made from the config and the tensors of the checkpoint, with all rows of its vocabulary. Where an adapter was
    merged, and PEFT is installed, its logits are compared with those of the base below the adapter first.

    Raises:
        ConfigurationError: transformers is not installed, or cannot make that model; the config does not fit the tensors. What is returned
            raises it if transformers cannot load the folder, or the logits differ.
    """
    try:
        import transformers
    except ImportError as error:
        raise import_failure("the check of the logits", error) from error
    size = vocab_size(fitted.config)
    with _explained("make the trained model"):
        config = transformers.AutoConfig.for_model(**fitted.config)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        kind: Any = named if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) else None
        of_text = config.get_text_config()
        length = min(_NUM_TOKENS, getattr(of_text, "max_position_embeddings", _NUM_TOKENS))
        if size is not None and (rows := rows_of_vocabulary(fitted.trained)) is not None:
            of_text.vocab_size = rows
        with _of_type(fitted.config.get("dtype", fitted.config.get("torch_dtype"))):
            model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    _fill(model, fitted.trained)
    ids = torch.randint(size or 2, (1, length), generator=torch.Generator().manual_seed(0), device="cpu")
    expected = _logits(model, ids)
    if merging is not None:
        _require_merged(expected, model, ids, merging)
    del model

    def check(folder: Path) -> None:
        with _explained(f"load {folder.name}"), _quiet(transformers.utils.logging):
            loader = transformers.AutoModelForCausalLM if kind is None else kind
            options = {"use_safetensors": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
            found, info = loader.from_pretrained(folder, output_loading_info=True, **options)
        _require_fit({name.replace("_", " "): sorted(map(str, keys)) for name, keys in info.items()})
        logits = _logits(found, ids)
        try:  # a product with fewer rows may be added up in another order
            torch.testing.assert_close(logits, expected[..., : logits.shape[-1]], equal_nan=True)
        except AssertionError as error:
            raise ConfigurationError(
                ASKED,
                f": the logits of the model that transformers loads are not those of the trained one ({' '.join(str(error).split())}), so "
                "nothing is written; give the config of the model that was trained, by ",
                OTHER_CONFIG,
            ) from error

    return check


def _require_merged(merged: torch.Tensor, model: Any, ids: torch.Tensor, merging: Merging) -> None:
    """Compare the logits of the merged model with those of the base with the adapter beside it, as PEFT computes them, if it is installed.

    Raises:
        ConfigurationError: they differ by more than rounding of the merged weights does.
    """
    try:
        import peft
    except ImportError:
        return
    _fill(model, merging.base)
    with _explained("compute the logits of the adapter"):
        options = {name: value for name, value in json.loads(merging.config.text).items() if name in peft.LoraConfig.__dataclass_fields__}
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options | {"init_lora_weights": False, "base_model_name_or_path": None}))
        tensors = {name: tensor.read(whole(tensor.entry.shape)) for name, tensor in merging.adapter.items()}
        left = peft.set_peft_model_state_dict(adapted, tensors)
    _require_fit({"of the adapter": list(left.unexpected_keys)})
    expected = _logits(adapted, ids)
    most = float(expected.abs().max()) * math.sqrt(torch.finfo(expected.dtype).eps)
    if not (merged - expected).abs().max() <= most:
        raise ConfigurationError(ASKED, ": the logits of the merged model are not those of the adapter on its base, so nothing is written")


def _fill(model: Any, trained: Selection) -> None:
    """Load the tensors of a checkpoint into the model.

    Raises:
        ConfigurationError: they do not fit.
    """
    own: dict[str, torch.Tensor] = model.state_dict()
    tensors = {**trained.tensors, **{alias: trained.tensors[first] for alias, first in trained.aliases.items()}}
    pairs = {name: (own[name], tensor) for name, tensor in tensors.items() if name in own}
    filled = {value.data_ptr() for value, _ in pairs.values()}
    _require_fit(
        {
            "missing": [name for name, value in own.items() if value.data_ptr() not in filled],
            "of another shape": [
                f"{name} {tensor.entry.shape} instead of {tuple(value.shape)}"
                for name, (value, tensor) in pairs.items()
                if value.shape != tensor.entry.shape
            ],
        }
    )
    for value, tensor in pairs.values():
        value.copy_(tensor.read(whole(tensor.entry.shape)))


def _require_fit(problems: Mapping[str, list[str]]) -> None:
    reasons = "; ".join(f"{what}: {some_of(names)}" for what, names in problems.items() if names)
    if reasons:
        raise ConfigurationError(
            f"config.json is not that of these tensors ({reasons}); give the config of the model that was trained, by ", OTHER_CONFIG
        )


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.inference_mode(), _explained("compute the logits"):
        logits: torch.Tensor = model.eval()(**inputs)[0]
    return logits


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say in one sentence what transformers cannot do: it raises whatever its models do."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(ASKED, f": transformers cannot {what}: {' '.join(sentence(error).split()):.300}") from error


@contextmanager
def _of_type(dtype: str | None) -> Iterator[None]:
    """Make parameters of this type, and buffers of the type that the model chooses."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype or "float32"))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Show no bars and warnings of transformers: what it warns of is an error here."""
    was, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was:
            logging.enable_progress_bar()
