"""A path that holds no checkpoint of ours is read if safetensors or a file of torch.save is inside, or a sentence says what it is."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.support.dcp_runs import save_by_dcp
from tests.support.states import same_bits

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.arange(3.0)}
GOLDEN = Path(__file__).parents[2] / "golden"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 440449768\n"


def _saved(save: Callable[[Any, Any], object], state: Any) -> bytes:
    made = io.BytesIO()
    save(state, made)
    return made.getvalue()


def _zip(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return made.getvalue()


def _packed_anew(data: bytes) -> bytes:
    """Unpacked and packed by `zip -0`: other members come before data.pkl."""
    old, made = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in sorted(old.namelist(), reverse=True):
            archive.writestr(name, old.read(name))
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.safetensors"))
    return made.getvalue()


def _script() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises torch.compile
        return _saved(torch.jit.save, torch.jit.script(torch.nn.Linear(2, 2)))


def _exported() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _saved(torch.export.save, torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)))


TORCH = _saved(torch.save, WEIGHTS)
FILES: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "a pointer of Git LFS": (LFS, "a pointer of Git LFS .*: fetch the file by git lfs pull"),
    "GGUF": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "a GGUF file of llama.cpp: make safetensors of it"),
    "TorchScript": (_script, "a TorchScript program: load it by torch.jit.load"),
    "torch.export": (_exported, "a program of torch.export: load it by torch.export.load"),
    "torch.package": (_zip("m/.data/extern_modules", "m/m/x.pkl"), "a package of torch.package"),
    "torch.save, packed anew": (_packed_anew(TORCH), "a file of torch.save that was packed anew"),
    "npz": (_saved(lambda state, file: np.savez(file, **state), {"w": np.zeros(3)}), "an archive of NumPy"),
    "npy": (_saved(lambda state, file: np.save(file, state), np.zeros(3)), "an array of NumPy"),
    "another zip": (_zip("model.safetensors"), "a zip archive: unpack it"),
    "a cut zip": (_zip("model.safetensors")[:-20], "an archive that was cut off"),
    "tar": (_tar(), "a tar archive: unpack it"),
    "gzip": (gzip.compress(TORCH), "compressed by gzip: unpack it"),
    "bzip2": (bz2.compress(TORCH), "compressed by bzip2: unpack it"),
    "xz": (lzma.compress(TORCH), "compressed by xz: unpack it"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "an HDF5 file"),
    "a pickle": (pickle.dumps({"w": [1, 2]}), "a pickle that torch.save did not write"),
    "a web page": (b"\n<!DOCTYPE html>\n<html><head><title>401</title></head></html>", "a web page, .*: download or copy it again"),
    "an error of a store": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page"),
    "JSON": (b'{"error": "Repository not found"}', "JSON without tensors"),
    "text": ("Zugriff verweigert: ä\r\n".encode(), "text without tensors"),
    "nothing": (b"", "an empty file: download or copy it again"),
    "bytes": (bytes(range(256)) * 40, "a file of none of the formats"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pt", ".bin", ""])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, kind: str, suffix: str) -> None:
    data, said = FILES[kind]
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data if isinstance(data, bytes) else data())
    with pytest.raises(CheckpointNotFoundError, match=f"x{suffix} is {said}"):
        ckpt.load(path, allow_pickle=True)


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind not in ("bytes", "nothing")])
def test_weights_that_are_something_else_are_named_in_a_file_and_in_a_folder(tmp_path: Path, kind: str) -> None:
    data, said = FILES[kind]
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / name).write_bytes(data if isinstance(data, bytes) else data())
        if " without tensors" not in said or name == "model.safetensors":
            with pytest.raises(CheckpointError, match=f"{name} is (no safetensors file: it is )?{said}"):
                ckpt.load(folder, allow_pickle=True)
    with pytest.raises(CorruptCheckpointError, match=f"model.safetensors is no safetensors file: it is {said}"):
        ckpt.load(tmp_path / "model" / "model.safetensors")


def test_a_cut_off_file_of_torch_save_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(TORCH[:-50])
    with pytest.raises(CorruptCheckpointError, match="no archive of torch.save: it is an archive that was cut off"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)


def _split(folder: Path, index: str, names: tuple[str, str], save: Callable[[Any, Any], object]) -> None:
    files = dict(zip(WEIGHTS, names, strict=True))
    for name, file in files.items():
        save({name: WEIGHTS[name]}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": files}))


def _in(name: str, save: Callable[[Any, Any], object]) -> Callable[[Path], object]:
    return lambda folder: save(WEIGHTS, folder / name)


def _in_two(stem: str, kind: str, save: Callable[[Any, Any], object], *, variant: str = "") -> Callable[[Path], object]:
    names = f"{stem}-00001-of-00002.{kind}", f"{stem}-00002-of-00002.{kind}"
    return lambda folder: _split(folder, f"{stem}.{kind}.index{variant}.json", names, save)


READ: dict[str, Callable[[Path], object]] = {
    "pytorch_model.bin": _in("pytorch_model.bin", torch.save),
    "an index of .bin": _in_two("pytorch_model", "bin", torch.save),
    "an index": _in_two("model", "safetensors", save_file),
    "a variant": _in("model.fp16.safetensors", save_file),
    "a variant of .bin": _in("pytorch_model.fp16.bin", torch.save),
    "a variant in several files": _in_two("model", "safetensors", save_file, variant=".fp16"),
    "diffusers": _in("diffusion_pytorch_model.safetensors", save_file),
    "diffusers in several files": _in_two("diffusion_pytorch_model", "safetensors", save_file),
    "an adapter": _in("adapter_model.safetensors", save_file),
    "an adapter of .bin": _in("adapter_model.bin", torch.save),
    "Mistral's": _in("consolidated.safetensors", save_file),
}


@pytest.mark.parametrize("case", READ)
def test_a_folder_of_hugging_face_s_is_read_as_its_weights_are(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    READ[case](folder)
    for path in (folder, *folder.glob("*.index*.json")):
        loaded = ckpt.load(path, allow_pickle=True)
        assert loaded.keys() == WEIGHTS.keys()
        assert all(same_bits(loaded[name], one) for name, one in WEIGHTS.items())
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 3)})
    with Checkpointer(tmp_path / "own", model=model, save_rng=False, allow_pickle=True) as checkpoints:
        checkpoints.restore(folder)
    assert all(same_bits(model.state_dict()[name], one) for name, one in WEIGHTS.items())


@pytest.mark.parametrize(
    "options", [{}, {"max_shard_size": "4KB"}, {"variant": "fp16"}, {"variant": "fp16", "max_shard_size": "4KB"}]
)
def test_what_transformers_saves_is_read_from_the_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=90, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path, **options)
    loaded = ckpt.load(tmp_path)
    assert all(same_bits(loaded[name], model.state_dict()[name]) for name in loaded)
    assert loaded.keys() == model.state_dict().keys() - {"lm_head.weight"}


def test_what_trainer_saves_beside_the_weights_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "global_step500").mkdir()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "tokenizer.json", "optimizers.md"):
        (tmp_path / name).write_bytes(b"")
    assert same_bits(ckpt.load(tmp_path)["a.bias"], WEIGHTS["a.bias"])
    (said,) = caplog.messages
    assert said.endswith("give the path of what lies beside them: global_step500, optimizer.pt, rng_state_0.pth, scheduler.pt")
    caplog.clear()
    ckpt.load(tmp_path / "model.safetensors")
    assert caplog.messages == []


def test_safetensors_are_known_without_their_suffix(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "4d7a214614ab")  # a blob of a cache, a download under way
    assert ckpt.load(tmp_path / "4d7a214614ab").keys() == WEIGHTS.keys()


def test_the_plain_name_comes_before_a_variant_and_several_variants_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "model.bf16.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"give one that it holds, such as .*model\.fp16.*model\.bf16"):
        ckpt.load(tmp_path)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert ckpt.load(tmp_path).keys() == WEIGHTS.keys()


def test_values_of_a_bin_index_come_from_the_file_it_names_alone(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "twice": torch.zeros(1), "step": 7}, tmp_path / "a.bin")
    torch.save({"twice": torch.ones(1), "unnamed": torch.ones(1)}, tmp_path / "b.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "twice": "b.bin", "step": "a.bin"}}))
    loaded = ckpt.load(tmp_path, allow_pickle=True)
    assert loaded.keys() == {"w", "twice", "step"} and loaded["step"] == 7 and loaded["twice"] == 1
    index.write_text(json.dumps({"weight_map": {"w": "b.bin"}}))
    with pytest.raises(CorruptCheckpointError, match="names 'w' in b.bin, which does not hold it"):
        ckpt.load(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"w": "../secret.KIND"}}', '{"weight_map": {"w": "SECRET"}}', '{"weight_map": {"w": "link.KIND"}}',
        '{"weight_map": {"w": "."}}', '{"weight_map": {"w": "missing.KIND"}}', '{"weight_map": {"w": 7}}', '{"weight_map": ["w"]}', "{}",
        "[]", "{", '{"weight_map": {"w": "a", "w": "b"}}', '{"weight_map": {"w": "w\\u0000"}}', "",
    ],
)  # fmt: skip
def test_a_hostile_index_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    save = {"safetensors": save_file, "bin": torch.save}[kind]
    save({"w": torch.ones(2)}, tmp_path / f"secret.{kind}")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"link.{kind}").symlink_to(tmp_path / f"secret.{kind}")
    stem = "model" if kind == "safetensors" else "pytorch_model"
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(text.replace("SECRET", str(tmp_path / f"secret.{kind}")).replace("KIND", kind))
    for path in (folder, index):
        with pytest.raises(CorruptCheckpointError):
            ckpt.load(path, allow_pickle=True)


def test_a_huge_index_and_a_link_in_a_folder_are_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="1099511627776 bytes, where at most"):
        ckpt.load(tmp_path)
    torch.save(WEIGHTS, tmp_path / "secret.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pytorch_model.bin").symlink_to(tmp_path / "secret.pt")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        ckpt.load(tmp_path / "folder", allow_pickle=True)


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", "x.ckpt"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError):
        ckpt.load(tmp_path, allow_pickle=True)
    with pytest.raises(CheckpointError):
        ckpt.load(tmp_path / "pytorch_model.bin", allow_pickle=True)


FOLDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "ZeRO": (
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
        "DeepSpeed's ZeRO .*ds_to_universal --input_folder=F --output_folder=F_universal",
    ),
    "a root of ZeRO": (
        (
            "latest", "zero_to_fp32.py", "global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        "--input_folder=F/global_step10 ",
    ),
    "DeepSpeed": (("mp_rank_00_model_states.pt",), "DeepSpeed without ZeRO: give its file F/mp_rank_00_model_states.pt"),
    "unfinished DCP": (("__0_0.distcp",), r"was not finished, for \.metadata is written last"),
    "a root of Megatron-Core": (("iter_0000002/metadata.json", "iter_0000010/metadata.json"), "give one, such as F/iter_0000010$"),
    "Megatron-LM": (("mp_rank_00/model_optim_rng.pt",), "Megatron-LM in the parts of its ranks"),
    "a manager of Orbax": (("9/_CHECKPOINT_METADATA", "10/_CHECKPOINT_METADATA", "10/default/_METADATA"), "give a step, such as F/10$"),
    "unfinished Orbax": (("10.orbax-checkpoint-tmp-5/default",), "is not a checkpoint: a save of Orbax in it was not finished"),
    "a pipeline": (("model_index.json", "vae/config.json"), "a pipeline of diffusers"),
    "a cache": (("blobs/x", "refs/main", "snapshots/77ab/config.json"), "give the snapshot F/snapshots/77ab$"),
    "no index": (("model-00001-of-00002.safetensors",), r"without their index: get its model\.safetensors\.index\.json"),
    "no index of .bin": (("pytorch_model-00001-of-00002.bin",), r"without their index: get its pytorch_model\.bin\.index\.json"),
    "Llama": (("params.json", "consolidated.00.pth", "consolidated.01.pth"), "a model of Llama"),
    "a Trainer": (("checkpoint-90/trainer_state.json", "checkpoint-100/trainer_state.json"), "Trainer: give .*such as F/checkpoint-100$"),
    "Lightning": (("epoch=9-step=90.ckpt", "epoch=10-step=100.ckpt", "last.ckpt"), r"Lightning's .*such as F/epoch=10-step=100\.ckpt"),
    "a run of Lightning": (("lightning_logs/version_0/checkpoints/x=1.ckpt",), r"F/lightning_logs/version_0/checkpoints/x=1\.ckpt$"),
    "GGUF": (("model-Q4.gguf",), "the GGUF file"),
    "Flax": (("config.json", "flax_model.msgpack"), "a model of Flax"),
    "TensorFlow": (("config.json", "tf_model.h5"), "a model of TensorFlow"),
    "a configuration": (("config.json", "tokenizer.json"), "without weights"),
    "nothing": ((), "an empty folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_something_else_is_named(tmp_path: Path, case: str) -> None:
    files, said = FOLDERS[case]
    folder = tmp_path / "{folder}"
    folder.mkdir()
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"\0")
    with pytest.raises(CheckpointNotFoundError, match=re.sub(r"\bF(?=[/ _])", str(folder), said)):
        ckpt.load(folder, allow_pickle=True)


def test_folders_that_orbax_and_megatron_core_wrote_are_named(tmp_path: Path) -> None:
    for folder, said in (
        (
            GOLDEN / "orbax" / "manager",
            f"a root of Orbax's CheckpointManager: give a step, such as {GOLDEN}/orbax/manager/",
        ),
        (
            GOLDEN / "megatron" / "tp2",
            "written by Megatron-Core's zarr strategy: load it by ckpt.dist_checkpointing.load",
        ),
    ):
        with pytest.raises(CheckpointNotFoundError, match=said):
            ckpt.load(folder, allow_pickle=True)


def test_a_folder_of_readable_ones_names_them_and_a_file_of_one_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    save_file(WEIGHTS, tmp_path / "transformer" / "model.safetensors")
    save_by_dcp(WEIGHTS, tmp_path / "dcp")
    ckpt.save(WEIGHTS, tmp_path / "others" / "x" / "ours")
    with pytest.raises(
        CheckpointNotFoundError, match=f"give one that it holds, such as {tmp_path}/transformer, {tmp_path}/dcp$"
    ):
        ckpt.load(tmp_path)
    for file in ("dcp/.metadata", "dcp/__0_0.distcp", "others/x/ours/checkpoint_manifest.json"):
        folder = (tmp_path / file).parent
        with pytest.raises(CheckpointNotFoundError, match=f"it is a file of the one in its folder; give {folder}$"):
            ckpt.load(tmp_path / file, allow_pickle=True)


def test_what_remains_of_one_of_ours_is_not_taken_for_another_program_s(tmp_path: Path) -> None:
    ckpt.save({"model": WEIGHTS}, tmp_path / "ours", format="kimi-engine")
    (tmp_path / "ours" / "checkpoint_manifest.json").unlink()
    with pytest.raises(
        CheckpointNotFoundError, match="is not a checkpoint: it has no checkpoint_manifest.json, which is"
    ):
        ckpt.load(tmp_path / "ours")


@pytest.mark.parametrize("state", [{}, {"model": {}}, {"model": {}, "optimizer": {}}])
def test_an_empty_state_comes_back_empty(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "x.pt")
    assert ckpt.load(tmp_path / "x.pt", allow_pickle=True) == state
