"""Compare the logits of the model that transformers loads from an exported folder with those of the trained model. On one rank.

transformers is imported here alone, and only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import Argument, ConfigurationError, import_failure, sentence
from ckpt.format.box import whole
from ckpt.interop.safetensors.fitting import OTHER_CONFIG, Fitted, rows_of_vocabulary, vocab_size
from ckpt.interop.safetensors.writing import Selection
from ckpt.loading.report import some_of

LOGITS = "logits"
ASKED = Argument("check", LOGITS)
_NUM_TOKENS = 16


def logits_check(fitted: Fitted) -> Callable[[Path], None]:
    """Compute the logits of the trained model, and return what compares them with those of the model in a folder.

    The trained model is made from the config and the tensors of the checkpoint, with all rows of its vocabulary.

    Raises:
        ConfigurationError: transformers is not installed, or cannot make that model; the config does not fit the tensors. What is returned
            raises it if transformers cannot load the folder, or the logits differ.
    """
    try:
        import transformers
    except ImportError as error:
        raise import_failure("the check of the logits", error) from error
    size = vocab_size(fitted.config)
    with _told("make the trained model"):
        config = transformers.AutoConfig.for_model(**fitted.config)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        of_text = config.get_text_config()
        length = min(_NUM_TOKENS, getattr(of_text, "max_position_embeddings", _NUM_TOKENS))
        if size is not None and (rows := rows_of_vocabulary(fitted.trained)) is not None:
            of_text.vocab_size = rows
        with _of_type(fitted.config.get("dtype", fitted.config.get("torch_dtype"))):
            model = transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    _fill(model, fitted.trained)
    ids = torch.randint(size or 2, (1, length), generator=torch.Generator().manual_seed(0))
    expected = _logits(model, ids)
    del model

    def check(folder: Path) -> None:
        with _told(f"load {folder.name}"), _quiet(transformers.utils.logging):
            loader = transformers.AutoModelForCausalLM if kind is None else kind
            found, info = loader.from_pretrained(folder, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True)
        _require_fit({name.replace("_", " "): sorted(map(str, keys)) for name, keys in info.items()})
        logits = _logits(found, ids)
        wanted = expected[..., : logits.shape[-1]]
        if logits.shape == wanted.shape and logits.dtype == wanted.dtype and _are_close(logits, wanted):
            return
        what = f"shape {tuple(logits.shape)} and type {logits.dtype}, expected {tuple(wanted.shape)} and {wanted.dtype}"
        if logits.shape == wanted.shape and logits.dtype == wanted.dtype:
            what = f"they differ by up to {(logits - wanted).abs().max().item():.2g}"
        raise ConfigurationError(
            ASKED,
            f": the logits of the model that transformers loads are not those of the trained one ({what}), so nothing is written; give the "
            "config of the model that was trained, by ",
            OTHER_CONFIG,
        )

    return check


def _are_close(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether they are equal but for rounding: a product with fewer rows may be added up in another order."""
    try:
        torch.testing.assert_close(logits, wanted, equal_nan=True)
    except AssertionError:
        return False
    return True


def _fill(model: Any, trained: Selection) -> None:
    """Load the tensors of a checkpoint into the model.

    Raises:
        ConfigurationError: they do not fit.
    """
    own: dict[str, torch.Tensor] = model.state_dict()
    values = {name: tensor.read(whole(tensor.entry.shape)) for name, tensor in trained.tensors.items()}
    values |= {alias: values[first] for alias, first in trained.aliases.items()}
    given = {own[name].data_ptr() for name in values if name in own}
    _require_fit(
        {
            "missing": [name for name, tensor in own.items() if tensor.data_ptr() not in given],
            "of another shape": [
                f"{name} {tuple(value.shape)} instead of {tuple(own[name].shape)}"
                for name, value in values.items()
                if name in own and own[name].shape != value.shape
            ],
        }
    )
    model.load_state_dict(values, strict=False)


def _require_fit(problems: Mapping[str, list[str]]) -> None:
    told = "; ".join(f"{what}: {some_of(names)}" for what, names in problems.items() if names)
    if told:
        raise ConfigurationError(
            f"config.json is not that of these tensors ({told}); give the config of the model that was trained, by ", OTHER_CONFIG
        )


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.inference_mode(), _told("compute the logits"):
        logits: torch.Tensor = model.eval()(**inputs)[0]
    return logits


@contextmanager
def _told(what: str) -> Iterator[None]:
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
