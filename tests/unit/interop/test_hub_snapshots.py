"""Snapshots in Hugging Face's cache are read through their links to blobs; a link to anywhere else is refused, unread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CorruptCheckpointError
from ckpt.interop.safetensors.writing import model_files_in
from tests.support.dcp_runs import run_of
from tests.support.states import same_bits

REVISION = "1b" + "7" * 38
INDEX = "model.safetensors.index.json"
TENSORS = {f"layer.{number}.weight": torch.arange(6.0) + number for number in range(4)}


class Cache:
    """Hugging Face's cache with one snapshot of one model."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "models--org--name"
        self.snapshot = self.model / "snapshots" / REVISION
        self.blobs = self.model / "blobs"
        self.snapshot.mkdir(parents=True)
        self.blobs.mkdir()

    def blob(self, name: str, write: Callable[[Path], object]) -> Path:
        """Add a file; return its place in the snapshot."""
        digest = f"{len(list(self.blobs.iterdir())):064x}"
        write(self.blobs / digest)
        (self.snapshot / name).symlink_to(f"../../blobs/{digest}")
        return self.snapshot / name

    def whole_model(self) -> Path:
        return self.blob("model.safetensors", lambda path: save_file(TENSORS, path))

    def model_in_two(self) -> None:
        files = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(TENSORS)}
        for file in sorted(set(files.values())):
            some = {name: TENSORS[name] for name in TENSORS if files[name] == file}
            self.blob(file, lambda path, some=some: save_file(some, path))  # type: ignore[misc]
        self.blob(INDEX, lambda path: path.write_text(json.dumps({"metadata": {}, "weight_map": files})))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "hub")


def require_loaded(loaded: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == TENSORS.keys()
    assert all(same_bits(loaded[name], TENSORS[name]) for name in TENSORS)


def test_a_snapshot_is_loaded_by_its_file_and_by_its_folder(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache.whole_model()
    assert try_to_load_from_cache("org/name", file.name, cache_dir=cache.root, revision=REVISION) == str(file)
    require_loaded(ckpt.load(file))
    require_loaded(ckpt.load(cache.snapshot))
    (cache.root / "mine").symlink_to(cache.snapshot)
    require_loaded(ckpt.load(cache.root / "mine"))
    monkeypatch.chdir(cache.snapshot)
    require_loaded(ckpt.load("."))
    require_loaded(ckpt.load("model.safetensors"))


@pytest.mark.parametrize("load", ["direct", "two-stage"])
def test_a_snapshot_in_several_files_is_loaded(cache: Cache, load: str) -> None:
    cache.model_in_two()
    require_loaded(ckpt.load(cache.snapshot, load=load))
    require_loaded(ckpt.load(cache.snapshot / INDEX, load=load))


@pytest.mark.parametrize("in_two", [False, True])
def test_a_snapshot_of_bin_files_is_loaded(cache: Cache, in_two: bool) -> None:
    files = {name: f"{number % 2 if in_two else 'pytorch_model'}.bin" for number, name in enumerate(TENSORS)}
    for file in sorted({*files.values()}):
        some = {name: one for name, one in TENSORS.items() if files[name] == file}
        cache.blob(file, lambda path, some=some: torch.save(some, path))  # type: ignore[misc]
    if in_two:
        cache.blob("pytorch_model.bin.index.json", lambda path: path.write_text(json.dumps({"weight_map": files})))
    require_loaded(ckpt.load(cache.snapshot, allow_pickle=True))


def test_a_bin_file_of_a_snapshot_that_is_a_link_to_outside_is_refused(cache: Cache, tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "outside.bin")
    (cache.snapshot / "pytorch_model.bin").symlink_to(os.path.relpath(tmp_path / "outside.bin", cache.snapshot))
    with pytest.raises(CorruptCheckpointError, match="links to ../../blobs/<name> alone are read"):
        ckpt.load(cache.snapshot, allow_pickle=True)


def test_a_run_goes_on_from_a_snapshot(cache: Cache, tmp_path: Path) -> None:
    saved, live = run_of(0)["model"], run_of(1)["model"]
    cache.blob("model.safetensors", lambda path: save_file(saved.state_dict(), path))
    with Checkpointer(tmp_path / "own", model=live, save_rng=False) as checkpoints:
        assert checkpoints.restore(cache.snapshot) == 0  # not the number at the end of the folder's name
    assert all(same_bits(live.state_dict()[name], one) for name, one in saved.state_dict().items())


def test_files_of_a_snapshot_that_are_no_links_are_read_too(cache: Cache) -> None:
    """As the cache has them where the file system has no links."""
    save_file(TENSORS, cache.snapshot / "model.safetensors")
    cache.blob("config.json", lambda path: path.write_text("{}"))
    require_loaded(ckpt.load(cache.snapshot))
    found = model_files_in(cache.snapshot)
    assert list(found.places) == ["config.json"] and (found.root / found.places["config.json"]).read_text() == "{}"


def _to_outside(cache: Cache, outside: Path) -> None:
    (cache.snapshot / "model.safetensors").symlink_to(os.path.relpath(outside, cache.snapshot))


def _absolute(cache: Cache, outside: Path) -> None:
    file = cache.whole_model()
    blob = file.resolve()
    file.unlink()
    file.symlink_to(blob)


def _to_another_model(cache: Cache, outside: Path) -> None:
    other = cache.root / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "a").write_bytes(outside.read_bytes())
    (cache.snapshot / "model.safetensors").symlink_to("../../../models--org--other/blobs/a")


def _above_the_blobs(cache: Cache, outside: Path) -> None:
    (cache.model / "x").write_bytes(outside.read_bytes())
    (cache.snapshot / "model.safetensors").symlink_to("../../blobs/../x")


def _to_a_link(cache: Cache, outside: Path) -> None:
    (cache.blobs / "a").symlink_to(outside)
    (cache.snapshot / "model.safetensors").symlink_to("../../blobs/a")


def _to_a_link_to_a_blob(cache: Cache, outside: Path) -> None:
    (cache.blobs / "b").write_bytes(outside.read_bytes())
    (cache.blobs / "a").symlink_to("b")
    (cache.snapshot / "model.safetensors").symlink_to("../../blobs/a")


def _through_a_snapshot(cache: Cache, outside: Path) -> None:
    (cache.whole_model()).rename(cache.snapshot / "other")
    (cache.snapshot / "model.safetensors").symlink_to("other")


def _blobs_elsewhere(cache: Cache, outside: Path) -> None:
    cache.blobs.rmdir()
    cache.blobs.symlink_to(outside.parent)
    (cache.snapshot / "model.safetensors").symlink_to(f"../../blobs/{outside.name}")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that would load, if it was read."""
    (tmp_path / "private").mkdir()
    save_file(TENSORS, tmp_path / "private" / "file")
    return tmp_path / "private" / "file"


@pytest.mark.parametrize(
    ("craft", "sentence"),
    [
        (_to_outside, r"links to \.\./\.\./blobs/<name> alone are read"),
        (_absolute, r"links to \.\./\.\./blobs/<name> alone are read"),
        (_to_another_model, r"links to \.\./\.\./blobs/<name> alone are read"),
        (_above_the_blobs, r"links to \.\./\.\./blobs/<name> alone are read"),
        (_through_a_snapshot, r"links to \.\./\.\./blobs/<name> alone are read"),
        (_to_a_link, "blobs/a is a symbolic link, or lies behind one"),
        (_to_a_link_to_a_blob, "blobs/a is a symbolic link, or lies behind one"),
        (_blobs_elsewhere, "is a symbolic link, or lies behind one"),
    ],
)
@pytest.mark.parametrize("by", ["folder", "file"])
def test_a_link_to_anywhere_else_is_refused(
    cache: Cache, outside: Path, craft: Callable[[Cache, Path], None], sentence: str, by: str
) -> None:
    craft(cache, outside)
    path = cache.snapshot if by == "folder" else cache.snapshot / "model.safetensors"
    with pytest.raises(CorruptCheckpointError, match=sentence):
        ckpt.load(path)


@pytest.mark.parametrize("target", ["outside", "link", "folder", "gone"])
def test_an_index_and_the_files_that_it_names_are_refused_likewise(cache: Cache, outside: Path, target: str) -> None:
    cache.model_in_two()
    name = INDEX if target == "outside" else "model-00002-of-00002.safetensors"
    blob = cache.blobs / (cache.snapshot / name).readlink().name
    if target == "outside":
        (cache.snapshot / name).unlink()
        (cache.snapshot / name).symlink_to(outside)
    else:
        blob.unlink()
    if target == "link":
        blob.symlink_to(outside)
    if target == "folder":
        blob.mkdir()
    with pytest.raises(CorruptCheckpointError, match="links to|symbolic link|is a folder|No such file"):
        ckpt.load(cache.snapshot)


@pytest.mark.parametrize(
    "name", ["../../../private/file", "../../blobs/x", "sub/file", "/etc/hostname", "a\0b", "..", "\ud800"]
)
def test_an_index_names_no_file_outside_of_its_snapshot(cache: Cache, outside: Path, name: str) -> None:
    (cache.snapshot / "sub").mkdir()
    (cache.snapshot / "sub" / "file").symlink_to("../../blobs/x")
    cache.blob(INDEX, lambda path: path.write_text(json.dumps({"weight_map": {"w": name}})))
    with pytest.raises(CorruptCheckpointError):
        ckpt.load(cache.snapshot)


def test_a_config_that_is_a_link_to_elsewhere_is_refused(cache: Cache, outside: Path) -> None:
    cache.whole_model()
    (cache.snapshot / "config.json").symlink_to(outside)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is a link to .*blobs/<name> alone are read"):
        model_files_in(cache.snapshot)


def test_links_to_blobs_are_read_in_snapshots_alone(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "model" / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (tmp_path / "model" / "blobs").mkdir()
    save_file(TENSORS, tmp_path / "model" / "blobs" / "a")
    (folder / "model.safetensors").symlink_to("../../blobs/a")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        ckpt.load(folder)
