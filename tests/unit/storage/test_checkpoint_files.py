"""The one door to a checkpoint's files: nothing outside of its folder is opened, whatever paths a record gives and whatever lies there."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent, dist_checkpointing
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.reading import InspectKeys, show
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.serialization import load_common_state_dict, remove_sharded_tensors
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.format.records import FileRecord
from ckpt.interop.registry import source_at
from ckpt.interop.rewriting import rewrite
from ckpt.interop.safetensors.writing import export, select
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import ManifestSource
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.storage import checkpoint_files
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.direct_io import Buffers
from ckpt.storage.files import read_once
from ckpt.storage.sink import FileSink
from ckpt.storage.stored import check_file, read_listed_file, read_manifest
from tests.support.crafts import MANIFEST, edit_index, edit_manifest, index_path, manifest_tree, resign, write_manifest
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator, global_index, sized

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
W = "model/w/c/0/0"
"""The file of the one chunk of the large tensor."""


@pytest.fixture(params=["openat2", "walk"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Linux's own call, and what stands in for it on a kernel that has none."""
    if request.param == "walk":
        monkeypatch.setattr(checkpoint_files, "_SYSCALL", None)
    return str(request.param)


class Watched:
    """A folder beside a checkpoint, of which nothing may be read, and around both nothing written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._knows_reads = _knows_reads(folder.parent)
        self._before: dict[str, bytes] = {}

    def start(self, *changing: Path) -> None:
        """Note what is there now; below `changing`, anything may come and go."""
        self._changing = changing
        for file in self._files():
            os.utime(file, (1, 2))  # the next read moves the first of these
        self._before = self._state()

    def require_untouched(self) -> None:
        assert not self._knows_reads or [file for file in self._files() if os.stat(file).st_atime != 1] == [], "read"
        assert self._state() == self._before, "written"

    def _files(self) -> list[Path]:
        return [file for file in self.folder.rglob("*") if file.is_file()]

    def _state(self) -> dict[str, bytes]:
        found = {}
        for inside, _, names in os.walk(self.folder.parent):
            for file in (Path(inside, name) for name in names):
                if not any(file.is_relative_to(one) for one in self._changing):
                    found[str(file)] = b"" if self.folder in file.parents else os.lstat(file).st_size.to_bytes(8)
        return found


def _knows_reads(folder: Path) -> bool:
    """Whether the file system notes when a file is read; with the mount option noatime none does."""
    control = folder / "control"
    control.write_bytes(b"x")
    os.utime(control, (1, 2))
    control.read_bytes()
    found = os.stat(control).st_atime
    control.unlink()
    return found != 1


def components(*, blank: bool = False) -> list[StateComponent]:
    w = torch.zeros(130, 130) if blank else global_index((130, 130))
    small = torch.zeros(5) if blank else torch.arange(5.0)
    return [
        StateComponent("model", Held({"w": w, "small": small}), "global"),
        StateComponent("rng", Held({"seed": 0 if blank else 7}), "per_rank"),
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a coordinator, by backend, and one of a sharded state dict."""
    root = tmp_path_factory.mktemp("saved")
    backends = {
        "zarr": ZarrBackend(),
        "zstd": ZarrBackend(compressors=ZSTD),
        "kimi": KimiEngineBackend(pool=False),
        "ocdbt": TensorStoreBackend(),
    }
    for name, backend in backends.items():
        saver = coordinator(Topology.alone(), root / name, components(), backend=backend, config_text="run: 1\n")
        saver.save_checkpoint(checkpoint_id="1")
    (root / "sharded").mkdir()
    with use_topology(Topology.alone()):
        dist_checkpointing.save(sharded_state(), root / "sharded")
    return {name: root / name / "checkpoint-1" for name in backends} | {"sharded": root / "sharded"}


def sharded_state() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", global_index((6, 5))),
        "o": ShardedObject("o", {"a": [1, 2]}, (1,), (0,)),
        "step": 3,
    }


@pytest.fixture
def craft(tmp_path: Path, saved: dict[str, Path]) -> Callable[..., Path]:
    """Copies a checkpoint, and puts beside it what it will be made to name."""

    def copy(name: str = "zarr") -> Path:
        shutil.copytree(saved[name], tmp_path / "root" / "checkpoint-1")
        return tmp_path / "root" / "checkpoint-1"

    return copy


@pytest.fixture
def outside(tmp_path: Path) -> Watched:
    (tmp_path / "root" / "outside").mkdir(parents=True)
    return Watched(tmp_path / "root" / "outside")


def moved(folder: Path, path: str, outside: Path, name: str = "x") -> Path:
    """Move a file of the checkpoint out of it: what is read there has the digests that are on record."""
    (outside / name).parent.mkdir(parents=True, exist_ok=True)
    return (folder / path).rename(outside / name)


def renamed(tree: dict[str, Any], table: str, old: str, new: str) -> None:
    """Give a key of a table another name, in the same place."""
    tree[table] = {new if key == old else key: value for key, value in tree[table].items()}


def a_chunk_above(folder: Path, outside: Path) -> None:
    moved(folder, W, outside)
    edit_index(folder, 0, lambda tree: renamed(tree, "files", W, "../outside/x"))


def a_chunk_through_a_folder(folder: Path, outside: Path) -> None:
    moved(folder, W, outside)
    edit_index(folder, 0, lambda tree: renamed(tree, "files", W, "model/../../outside/x"))


def an_absolute_chunk(folder: Path, outside: Path) -> None:
    file = moved(folder, W, outside)
    edit_index(folder, 0, lambda tree: renamed(tree, "files", W, str(file)))


def an_open_file_of_the_process(folder: Path, outside: Path) -> None:
    moved(folder, W, outside)
    edit_index(folder, 0, lambda tree: renamed(tree, "files", W, "/proc/self/cwd/../outside/x"))


def a_linked_chunk(folder: Path, outside: Path) -> None:
    (folder / W).symlink_to(moved(folder, W, outside))


def a_linked_folder(folder: Path, outside: Path) -> None:
    (folder / "model" / "w").rename(outside / "w")
    (folder / "model" / "w").symlink_to("../../outside/w")


def a_link_to_an_open_file(folder: Path, outside: Path) -> None:
    moved(folder, W, outside)
    (folder / W).symlink_to("/proc/self/root" + str(outside / "x"))


def a_fifo(folder: Path, outside: Path) -> None:
    (folder / W).unlink()
    os.mkfifo(folder / W)


def a_socket(folder: Path, outside: Path) -> None:
    (folder / W).unlink()
    here = os.getcwd()
    os.chdir(folder / "model" / "w" / "c" / "0")  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("0")
    os.chdir(here)


def a_listed_file_above(folder: Path, outside: Path) -> None:
    (outside / "__init__.py").write_text("secret = 1\n")
    edit_manifest(folder, lambda tree: tree["files"].update({"../outside/__init__.py": [0, "0" * 32]}))
    resign(folder)


def a_linked_config(folder: Path, outside: Path) -> None:
    (folder / "config.yaml").symlink_to(moved(folder, "config.yaml", outside))


def a_linked_index(folder: Path, outside: Path) -> None:
    (folder / "index-00000.json").symlink_to(moved(folder, "index-00000.json", outside))


def a_linked_manifest(folder: Path, outside: Path) -> None:
    (folder / MANIFEST).symlink_to(moved(folder, MANIFEST, outside))


def a_fifo_for_an_index(folder: Path, outside: Path) -> None:
    (folder / "index-00000.json").unlink()
    os.mkfifo(folder / "index-00000.json")


def an_array_above(folder: Path, outside: Path) -> None:
    (folder / "model" / "w").rename(outside / "w")
    edit_index(folder, 0, lambda tree: renamed(tree, "chunks", "model/w", "../outside/w"))
    edit_manifest(folder, lambda tree: tree["arrays"]["model/w"].update(path="../outside/w"))


def a_pack_above(folder: Path, outside: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        (old,) = tree["packed"]
        renamed(tree, "packed", old, "../outside/p")
        renamed(tree, "chunks", old, "../outside/p")

    edit_index(folder, 0, change)


def a_dead_file_above(folder: Path, outside: Path) -> None:
    (outside / "x").write_bytes(b"secret")
    edit_index(folder, 0, lambda tree: tree.update(dead={"../outside/x": [[0, 6, 4 << 20, "0" * 16]]}))


def plain_values_above(folder: Path, outside: Path) -> None:
    moved(folder, "rng/rank-00000/plain.json", outside, "plain.json")

    def change(tree: dict[str, Any]) -> None:
        tree["components"]["rng"]["plain_in"] = {"../../outside/": 0}
        tree["files"]["rng/../../outside/plain.json"] = tree["files"].pop("rng/rank-00000/plain.json")

    edit_manifest(folder, change)


def a_component_above(folder: Path, outside: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["components"]["../outside"] = tree["components"].pop("rng") | {"key": "../outside"}

    edit_manifest(folder, change)


def a_component_without_a_name(folder: Path, outside: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["components"][""] = tree["components"].pop("model") | {"key": ""}
        tree["arrays"] = {name.removeprefix("model"): entry for name, entry in tree["arrays"].items()}

    edit_manifest(folder, change)


def a_checkpoint_above(folder: Path, outside: Path) -> None:
    data = (folder / MANIFEST).read_bytes()
    (outside / MANIFEST).write_bytes(data)
    edit_manifest(folder, lambda tree: tree["files"].update({f"../outside/{MANIFEST}": [0, "0" * 32]}))
    resign(folder)


def linked_plain_values(folder: Path, outside: Path) -> None:
    (folder / "rng" / "rank-00000").rename(outside / "rank-00000")
    (folder / "rng" / "rank-00000").symlink_to(outside / "rank-00000")


IN_RECORDS = (
    a_chunk_above, a_chunk_through_a_folder, an_absolute_chunk, an_open_file_of_the_process, a_listed_file_above, an_array_above,
    a_pack_above, a_dead_file_above, plain_values_above, a_component_above, a_component_without_a_name, a_checkpoint_above,
)  # fmt: skip
IN_FOLDER = (
    a_linked_chunk, a_linked_folder, a_link_to_an_open_file, a_fifo, a_socket, a_linked_config, a_linked_index, a_linked_manifest,
    a_fifo_for_an_index, linked_plain_values,
)  # fmt: skip


def load(folder: Path, dst: Path) -> None:
    coordinator(Topology.alone(), folder.parent, components(blank=True)).load_checkpoint(folder)


def load_by_two(folder: Path, dst: Path) -> None:
    run_threads(2, _load_in_two_stages, folder)


def _load_in_two_stages(topology: Topology, folder: Path) -> None:
    only_model = components(blank=True)[:1]
    coordinator(topology, folder.parent, only_model, strategy=TwoStageLoad()).load_checkpoint(folder, strict=False)


def verify(folder: Path, dst: Path) -> None:
    problems = verify_checkpoint(folder)
    if problems:
        raise CorruptCheckpointError("; ".join(problems))


def inspect(folder: Path, dst: Path) -> None:
    show(InspectKeys(path=str(folder), json=True))


def convert_to(name: str) -> Callable[[Path, Path], None]:
    backends: dict[str, Callable[[], Any]] = {
        "zarr": ZarrBackend,
        "ocdbt": TensorStoreBackend,
        "kimi": lambda: KimiEngineBackend(pool=False),
    }
    return lambda folder, dst: rewrite(folder, dst, backends[name](), Topology.alone()) and None


def to_safetensors(folder: Path, dst: Path) -> None:
    source = source_at(folder, Topology.alone(), DirectLoad(read_at=read_once))
    assert isinstance(source, ManifestSource)
    export(select(source, folder, "model"), dst, 1 << 40, Topology.alone())


def resume(folder: Path, dst: Path) -> None:
    coordinator(Topology.alone(), folder.parent, components(blank=True)).load_checkpoint()


ACTIONS = {
    "load": load,
    "resume": resume,
    "verify": verify,
    "inspect": inspect,
    "to zarr": convert_to("zarr"),
    "to ocdbt": convert_to("ocdbt"),
    "to kimi": convert_to("kimi"),
    "to safetensors": to_safetensors,
}
IN_INDEX = (
    a_chunk_above, a_chunk_through_a_folder, an_absolute_chunk, an_open_file_of_the_process, a_pack_above, a_dead_file_above,
)  # fmt: skip
NOT_CONCERNED = {
    "inspect": {*IN_FOLDER, *IN_INDEX} - {a_linked_manifest},
    "to safetensors": {linked_plain_values},
}
"""Actions that do not come near what is wrong, and so work as ever."""


def require_refused(act: Callable[[Path, Path], None], folder: Path, outside: Watched, dst: Path) -> str:
    """Act; nothing outside is touched, and what is said holds no digest."""
    outside.start(dst)
    with pytest.raises(CheckpointError) as caught:
        act(folder, dst)
    outside.require_untouched()
    assert not dst.exists() and [one.name for one in dst.parent.iterdir() if one.name.startswith(".convert")] == []
    said = str(caught.value)
    assert "xxh3" not in said and "\n" not in said
    return said


@pytest.mark.parametrize("shape", [*IN_RECORDS, *IN_FOLDER], ids=lambda shape: shape.__name__)
def test_what_leads_out_of_a_checkpoint_is_refused_by_whatever_reads_it(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path, shape: Callable[[Path, Path], None]
) -> None:
    folder = craft()
    shape(folder, outside.folder)
    for name, act in ACTIONS.items():
        if shape in NOT_CONCERNED.get(name, ()):
            act(folder, tmp_path / f"dst {name}")
            continue
        require_refused(act, folder, outside, tmp_path / "dst")


@pytest.mark.parametrize(
    "shape", [a_chunk_above, a_linked_chunk, a_linked_folder, a_fifo], ids=lambda one: one.__name__
)
def test_ranks_that_load_in_two_stages_all_refuse_it(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path, shape: Callable[[Path, Path], None]
) -> None:
    folder = craft()
    shape(folder, outside.folder)
    require_refused(load_by_two, folder, outside, tmp_path / "dst")


@pytest.mark.parametrize(
    "shape", [a_chunk_above, a_linked_chunk, a_linked_folder, a_link_to_an_open_file, a_fifo, a_socket]
)
def test_where_the_kernel_has_no_such_call_the_same_is_refused(
    craft: Callable[..., Path],
    outside: Watched,
    tmp_path: Path,
    shape: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_files, "_SYSCALL", None)
    folder = craft()
    shape(folder, outside.folder)
    for name in ("load", "verify", "to ocdbt"):
        require_refused(ACTIONS[name], folder, outside, tmp_path / "dst")


def test_a_library_that_opens_files_on_its_own_is_not_led_out(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path
) -> None:
    """Encoded chunks are read by the library of their store, which follows links. Other stores than zarr have none."""
    folder = craft("zstd")
    load(folder, tmp_path)  # it is, and can be
    place = folder / "model/w/zarr.json"
    place.rename(outside.folder / "x")
    place.symlink_to(outside.folder / "x")
    for act in (load, convert_to("zarr")):
        assert "symbolic link" in require_refused(act, folder, outside, tmp_path / "dst")


@pytest.mark.parametrize("part", ["common", "objects"])
@pytest.mark.parametrize(
    "how", ["a linked folder", "a linked file", "a listed file above", "a file that nothing lists"]
)
def test_checkpoints_inside_of_a_checkpoint_are_inside_of_it(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path, part: str, how: str
) -> None:
    folder = craft("sharded")
    if how == "a linked folder":
        (folder / part).rename(outside.folder / part)
        (folder / part).symlink_to(outside.folder / part)
    elif how == "a linked file":
        listed = next(iter(manifest_tree(folder / part)["files"]))
        (folder / part / listed).symlink_to(moved(folder, f"{part}/{listed}", outside.folder))
    elif how == "a listed file above":
        (outside.folder / "x").write_bytes(b"secret")
        edit_manifest(folder / part, lambda tree: tree["files"].update({"../../outside/x": [6, "0" * 32]}))
    else:
        (folder / part / "xxhash.py").write_text("planted = 1")
        rewrite(folder, tmp_path / "dst", ZarrBackend(), Topology.alone())
        assert not (tmp_path / "dst" / part / "xxhash.py").exists()
        return

    def load_common(folder: Path, dst: Path) -> None:
        with use_topology(Topology.alone()):
            dist_checkpointing.load(sharded_state(), folder)

    for act in (verify, load_common, convert_to("zarr"), convert_to("ocdbt")):
        require_refused(act, folder, outside, tmp_path / "dst")


@pytest.mark.parametrize("place", ["sharded", "sharded/w", "a new index"])
def test_a_removal_neither_writes_nor_removes_outside(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path, place: str
) -> None:
    folder = craft("sharded")
    if place == "a new index":
        (outside.folder / "x").write_bytes(b"secret")
        (folder / "index-00000.1.json").symlink_to(outside.folder / "x")
        with use_topology(Topology.alone()):
            remove_sharded_tensors(str(folder), "w")
        assert (outside.folder / "x").read_bytes() == b"secret"
        assert not (folder / index_path(folder, 0)).is_symlink() and verify_checkpoint(folder) == []
        return
    (folder / place).rename(outside.folder / "x")
    (folder / place).symlink_to(outside.folder / "x")

    def remove(folder: Path, dst: Path) -> None:
        with use_topology(Topology.alone()):
            remove_sharded_tensors(str(folder), "w")

    assert "symbolic link" in require_refused(remove, folder, outside, tmp_path / "dst")


@pytest.mark.parametrize("name", ["zarr.json", "sharded", "arrays.ocdbt", "common"])
def test_a_save_writes_through_no_link_that_lies_in_its_folder(tmp_path: Path, outside: Watched, name: str) -> None:
    """One that leads nowhere yet, too: a write would make the file that it names."""
    folder = tmp_path / "save"
    folder.mkdir()
    (folder / name).symlink_to(outside.folder / "x")
    outside.start(folder)
    with (
        use_topology(Topology.alone()),
        suppress(CheckpointError),
    ):  # a save into another store has no use for one of the names
        dist_checkpointing.save(sharded_state(), folder)
    outside.require_untouched()


def test_an_incremental_save_links_nothing_that_lies_outside(
    craft: Callable[..., Path], outside: Watched, tmp_path: Path
) -> None:
    folder = craft()
    (folder / "model" / "w" / "c").rename(outside.folder / "c")
    (folder / "model" / "w" / "c").symlink_to(outside.folder / "c")
    (tmp_path / "new").mkdir()
    out = FileSink(tmp_path / "new", 0, lambda _: None, sized(Buffers(direct_io=False), num_bytes=1 << 20))
    assert not out.link(W, folder, os.stat(outside.folder / "c" / "0" / "0").st_size)
    with pytest.raises(CorruptCheckpointError, match="not a path inside of"):
        out.write("../outside/y", [memoryview(b"x")], 1)
    out.abort()
    assert os.stat(outside.folder / "c" / "0" / "0").st_nlink == 1 and not (outside.folder / "y").exists()


def test_a_folder_that_is_a_link_itself_is_a_checkpoint_as_ever(
    craft: Callable[..., Path], tmp_path: Path, door: str
) -> None:
    (tmp_path / "scratch").symlink_to(craft().parent)
    folder = tmp_path / "latest"
    folder.symlink_to(tmp_path / "scratch" / "checkpoint-1")
    into = components(blank=True)
    coordinator(Topology.alone(), tmp_path / "scratch", into).load_checkpoint(folder)
    assert isinstance(into[0].stateful, Held) and into[0].stateful.loaded is not None
    assert torch.equal(into[0].stateful.loaded["w"], global_index((130, 130)))
    assert verify_checkpoint(folder) == []
    rewrite(folder, tmp_path / "dst", ZarrBackend(), Topology.alone())


def test_hard_links_are_ordinary_files(tmp_path: Path, door: str) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "folder").mkdir()
    os.link(tmp_path / "a", tmp_path / "folder" / "b")
    with CheckpointFolder(tmp_path) as folder:
        assert folder.read("folder/b", 4) == b"text" and folder.stat("folder/b").st_size == 4
        with pytest.raises(CorruptCheckpointError, match="has 4 bytes, where at most 3"):
            folder.read("folder/b", 3)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("missing", FileNotFoundError),
        ("file/below", NotADirectoryError),
        ("missing/below", FileNotFoundError),
        ("folder", CorruptCheckpointError),
        ("link", CorruptCheckpointError),
        ("linked/file", CorruptCheckpointError),
        ("linked", CorruptCheckpointError),
        ("fifo", CorruptCheckpointError),
        ("x" * 300, CorruptCheckpointError),
        ("", CorruptCheckpointError),
        ("../file", CorruptCheckpointError),
        ("folder/../file", CorruptCheckpointError),
        ("/etc/passwd", CorruptCheckpointError),
        ("a\0b", CorruptCheckpointError),
        ("\ud800", CorruptCheckpointError),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_door_says_what_it_found_instead_of_a_file(
    tmp_path: Path, door: str, path: str, error: type[Exception]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "linked").symlink_to(".")
    os.mkfifo(tmp_path / "fifo")
    open_before = len(os.listdir("/proc/self/fd"))
    with CheckpointFolder(tmp_path) as folder:
        for look in (folder.open, folder.stat):
            with pytest.raises(error) as caught:
                look(path)
            assert isinstance(caught.value, CorruptCheckpointError) or caught.value.filename == str(tmp_path / path)  # type: ignore[attr-defined]
        with pytest.raises((OSError, CorruptCheckpointError)):
            folder.open(path if path != "missing" else "link", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "folder", "link", "linked"]


def test_a_folder_is_looked_through_for_what_is_no_file(tmp_path: Path, door: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    with CheckpointFolder(tmp_path) as folder:
        folder.require_regular_below("a")
        assert folder.sizes_below() == folder.sizes_below("a") == {"a/b/file": 1}
        (tmp_path / "a" / "b" / "link").symlink_to("file")
        for look in (folder.require_regular_below, folder.sizes_below):
            with pytest.raises(CorruptCheckpointError, match="a/b/link is a symbolic link"):
                look("a")
        (tmp_path / "a" / "b" / "link").unlink()
        os.mkfifo(tmp_path / "a" / "b" / "fifo")
        with pytest.raises(CorruptCheckpointError, match="a/b/fifo is not a regular file"):
            folder.require_regular_below("a")
        (tmp_path / "c").symlink_to("a")
        with pytest.raises(CorruptCheckpointError, match="symbolic link"):
            folder.require_folder("c")


def test_a_manifest_that_names_other_checkpoints_inside_is_refused(craft: Callable[..., Path]) -> None:
    folder = craft()
    tree = manifest_tree(folder)
    tree["files"][f"model/{MANIFEST}"] = [1, "0" * 32]
    write_manifest(folder, tree)
    with pytest.raises(CorruptCheckpointError, match="a checkpoint inside of another one is called common or objects"):
        load(folder, folder)


def test_common_state_of_a_sound_checkpoint_loads(saved: dict[str, Path]) -> None:
    with use_topology(Topology.alone()):
        assert load_common_state_dict(saved["sharded"])["step"] == 3


@pytest.mark.parametrize(("code", "error"), [(errno.ENOENT, CorruptCheckpointError), (errno.EIO, OSError)])
def test_a_file_that_is_missing_is_damage_and_one_that_cannot_be_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """A load passes damage over for good; a disk that fails for a moment must not cost a sound checkpoint."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint_files, "_open_below", fail)
    with CheckpointFolder(tmp_path) as folder, pytest.raises(error) as caught:
        check_file(folder, "x", FileRecord(1, "0" * 32), [])
    assert isinstance(caught.value, CorruptCheckpointError) == (error is CorruptCheckpointError)


@pytest.mark.parametrize("path", [MANIFEST, "index-00000.json", "rng/rank-00000/plain.json", W])
def test_a_folder_in_place_of_a_file_is_damage(craft: Callable[..., Path], tmp_path: Path, path: str) -> None:
    folder = craft("zarr")
    (folder / path).unlink()
    (folder / path).mkdir()
    with pytest.raises(CorruptCheckpointError, match="is a folder, where a file should be|is missing or not as"):
        load(folder, tmp_path)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_listed_file_of_another_length_is_named_as_the_damaged_one(craft: Callable[..., Path], change: int) -> None:
    folder = craft("zarr")
    manifest = read_manifest(folder)
    path = next(path for path in manifest.files if path.startswith("index-"))
    size = (folder / path).stat().st_size
    os.truncate(folder / path, size + change)
    with pytest.raises(CorruptCheckpointError, match=f"{path} has {size + change} bytes") as caught:
        read_listed_file(folder, manifest, path)
    assert caught.value.file == path
