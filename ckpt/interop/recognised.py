"""Say what is at a path that holds no checkpoint that is read, and what to do: unfinished ones, parts, roots, files of other programs."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckpt.errors import CheckpointError
from ckpt.format.file_kinds import kind_of
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import Place
from ckpt.interop.megatron.layout import is_megatron_zarr
from ckpt.interop.programs import PROGRAMS, format_at
from ckpt.interop.safetensors.hub import opened, weights_at
from ckpt.loading.report import some_of
from ckpt.storage.checkpoint_files import is_file
from ckpt.storage.hub_snapshots import files_in
from ckpt.storage.metadata import other_format
from ckpt.storage.stored import checkpoints_below

_MOST_LISTED = 1000
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_READ_BY_LIBRARY = "load it by its library, and save the state dict by torch.save or as safetensors"
_OF_FOLDERS: tuple[tuple[str, str], ...] = (
    ("index-[0-9]*.json", f"not a checkpoint: it has no {MANIFEST_NAME}, which is written last; take one whose save has ended"),
    (
        "*zero_pp_rank_*_optim_states.pt",
        "a checkpoint of DeepSpeed's ZeRO in the parts of its ranks: make it universal by python -m deepspeed.checkpoint.ds_to_universal "
        "--input_folder={path} --output_folder={path}_universal, and give that",
    ),
    (
        "*/*zero_pp_rank_*_optim_states.pt",
        "a folder of checkpoints of DeepSpeed's ZeRO in the parts of their ranks: make one universal by python -m "
        "deepspeed.checkpoint.ds_to_universal --input_folder={above} --output_folder={above}_universal, and give that",
    ),
    ("mp_rank_*_model_states.pt", "a checkpoint of DeepSpeed without ZeRO: give its file {found}"),
    ("*.distcp", "a save of torch.distributed.checkpoint that was not finished, for .metadata is written last: take another"),
    ("iter_*/metadata.json", "a root of Megatron-Core's checkpoints: give one, such as {above}"),
    ("iter_*/mp_rank_*/model_optim_rng.pt", "a root of old checkpoints of Megatron-LM in parts: give one part, such as {found}"),
    ("mp_rank_*/model_optim_rng.pt", "an old checkpoint of Megatron-LM in the parts of its ranks: give one part, such as {found}"),
    ("*[0-9]/_CHECKPOINT_METADATA", "a root of Orbax's CheckpointManager: give a step, such as {above}"),
    ("*.orbax-checkpoint-tmp*", "not a checkpoint: a save of Orbax in it was not finished; take another"),
    ("model_index.json", "a pipeline of diffusers, of several models: give the folder of one, such as {path}/unet"),
    ("snapshots/*/*", "a repository in Hugging Face's cache: give the snapshot {above}"),
    ("*-00001-of-*.safetensors", "a model in several files without their index: get its model.safetensors.index.json, too"),
    ("*-00001-of-*.bin", "a model in several files without their index: get its pytorch_model.bin.index.json, too"),
    ("consolidated.*.pth", "a model of Llama in the parts of its ranks: give one part, such as {found}"),
    ("checkpoint-*/trainer_state.json", "a folder of Hugging Face's Trainer: give a checkpoint, such as {above}"),
    ("*.ckpt", "a folder of Lightning's checkpoints: give one, such as {found}"),
    ("checkpoints/*.ckpt", "a folder of Lightning's: give a checkpoint, such as {found}"),
    ("version_*/checkpoints/*.ckpt", "a folder of Lightning's: give a checkpoint, such as {found}"),
    ("lightning_logs/version_*/checkpoints/*.ckpt", "a folder of Lightning's: give a checkpoint, such as {found}"),
    ("*.gguf", "a folder with the GGUF file {found}: give a folder with safetensors"),
    ("flax_model*.msgpack", f"a model of Flax: {_READ_BY_LIBRARY}"),
    ("tf_model.h5", f"a model of TensorFlow: {_READ_BY_LIBRARY}"),
    ("saved_model.pb", f"a model of TensorFlow: {_READ_BY_LIBRARY}"),
    ("*.ckpt.index", f"a checkpoint of TensorFlow: {_READ_BY_LIBRARY}"),
    ("*.onnx", f"a model of ONNX: {_READ_BY_LIBRARY}"),
)  # fmt: skip
"""Pattern of what lies in a folder -> what the folder is, and what to do. `found` has the greatest numbers, `above` is its folder."""


def _matches(path: Path, pattern: str) -> list[Path]:
    """The files of a pattern in their order; none if a part of the folder is removed meanwhile."""
    try:
        return sorted(path.glob(pattern), key=_by_numbers)
    except FileNotFoundError:
        return []


def recognised(path: Path) -> str | None:
    """Return a sentence about a path without a checkpoint that is read: what is there, and what to do.

    None: nothing is there, or a folder about which no more is known than what `not_a_checkpoint` says.
    """
    if path.is_file():
        return _of_file(path)
    if not path.is_dir() or checkpoints_below(path):
        return None
    if (other := other_format(path)) is not None:
        return other
    with suppress(CheckpointError):  # somebody else's metadata.json
        if is_megatron_zarr(path):
            return (
                f"{path} was written by Megatron-Core's zarr strategy: load it by ckpt.dist_checkpointing.load, or convert it by "
                f"python -m recipes.convert src={path} dst=<a new folder>"
            )
    for pattern, description in _OF_FOLDERS:
        if matches := _matches(path, pattern):
            return f"{path} is {description.format(path=path, found=matches[-1], above=matches[-1].parent)}"
    listed = sorted(islice(path.iterdir(), _MOST_LISTED), key=_by_numbers, reverse=True)
    if not listed:
        return f"{path} is not a checkpoint: it is an empty folder"
    if below := [path for path in listed if _is_read(path)]:
        return f"{path} is not a checkpoint: give one that it holds, such as {some_of([str(path) for path in below])}"
    weights = weights_at(path)
    for file in [weights] if weights else [path for path in listed if path.suffix in _OF_WEIGHTS]:
        if (kind := _kind_of(path, file)) and " without tensors" not in kind:
            return f"{path} is not a checkpoint: {file} is {kind}"
    if (path / "config.json").is_file():
        return f"{path} is a folder of Hugging Face's without weights: get its model.safetensors, too"
    return None


def _of_file(path: Path) -> str:
    above = path.parent
    found = format_at(above)
    if (above / MANIFEST_NAME).is_file() or (found is not None and PROGRAMS[found].is_whole):
        return f"{path} is not a checkpoint: it is a file of the one in its folder; give {above}"
    kind = _kind_of(path, path)
    return f"{path} is {kind or 'a file of none of the formats that are read: give a safetensors file, or one of torch.save'}"


def _is_read(path: Path) -> bool:
    """Whether a folder, or a file by the suffix of weights, is read. Others are not opened, nor links: a folder may be of devices."""
    with suppress(OSError, CheckpointError):
        if path.is_symlink() and files_in(path.parent)[0] == path.parent:
            return False
        return (path.is_dir() or path.suffix in _OF_WEIGHTS) and format_at(path) is not None
    return False


def _kind_of(path: Place, file: Place) -> str | None:
    """`kind_of` the path itself, or of a file in that folder."""
    with suppress(OSError, CheckpointError):
        if is_file(file):
            with opened(path, file) as stream:
                return kind_of(stream)
    return None


def _by_numbers(path: Path) -> tuple[list[int], str]:
    """A key that sorts paths below one folder by the numbers in them."""
    return [int(digits) for digits in re.findall(r"[0-9]{1,18}", str(path))], str(path)
