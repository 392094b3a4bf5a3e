"""Whatever happens to a byte, a file or a name in a checkpoint, `verify_checkpoint` says so and names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt import StateComponent
from ckpt.catalog.verify import examine, verify_checkpoint
from ckpt.errors import CheckpointGoneError, CheckpointNotFoundError, ConfigurationError
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, Index, index_name
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_index, read_manifest
from tests.support.states import Held, coordinator

BIG = 1_500_000  # float32: one chunk of 6,000,000 bytes, so two blocks
BLOCK = 4 << 20


def save(root: Path, backend: str, **model: object) -> Path:
    components = [
        StateComponent("model", Held(model), "replicated"),
        StateComponent("rng", Held({"seed": 3, "words": [1, 2]}), "per_rank"),
    ]
    run = coordinator(Topology.alone(), root, components, backend=backend, config_text="a: 1\n")
    return Path(run.save_checkpoint(checkpoint_id="1"))


@pytest.fixture(scope="module", params=["zarr", "ocdbt", pytest.param("file", marks=pytest.mark.full), "safetensors"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp(request.param),
        request.param,
        big=torch.arange(BIG, dtype=torch.float32),
        grid=torch.arange(40_000, dtype=torch.float64).reshape(200, 200),
        first=torch.arange(5),
        second=torch.arange(5, 12),
        step=torch.tensor(7.0),
    )


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "copy")


@pytest.fixture(scope="module")
def zarr_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("zarr"),
        "zarr",
        big=torch.arange(BIG, dtype=torch.float32),
        first=torch.arange(5),
        second=torch.arange(5, 12),
    )


@pytest.fixture
def zarr_copy(zarr_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(zarr_checkpoint, tmp_path / "copy")


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def each_file(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file but the manifest, by name; what was done to it is undone after."""
    for path in files_of(checkpoint):
        if path.name != MANIFEST_NAME:
            saved = path.read_bytes()
            yield str(path.relative_to(checkpoint)), path
            path.write_bytes(saved)


def test_a_checkpoint_as_it_was_saved_has_no_problem_and_every_byte_is_read_once(checkpoint: Path) -> None:
    read: list[int] = []
    found = examine(checkpoint, progress=read.append)
    assert found.problems == []
    assert found.num_files == len(files_of(checkpoint))
    manifest_bytes = (checkpoint / MANIFEST_NAME).stat().st_size
    assert found.num_bytes == sum(read) == sum(path.stat().st_size for path in files_of(checkpoint)) - manifest_bytes


def test_verification_writes_nothing(checkpoint: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    verify_checkpoint(checkpoint)
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before


def test_a_flipped_byte_in_any_file_is_one_problem_that_names_the_file(checkpoint: Path) -> None:
    for name, path in each_file(checkpoint):
        for at in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
            flip(path, at)
            problems = verify_checkpoint(checkpoint)
            assert len(problems) == 1, (name, problems)
            assert name in problems[0]
            flip(path, at)
    assert verify_checkpoint(checkpoint) == []


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_any_flipped_bit_anywhere_is_one_problem_that_names_the_file(checkpoint: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files_of(checkpoint)))
    at, bit = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7))
    flip(path, at, bit)
    problems = verify_checkpoint(checkpoint)
    flip(path, at, bit)
    assert len(problems) == 1
    assert str(path.relative_to(checkpoint)) in problems[0]


def test_a_file_cut_short_or_grown_by_a_byte_is_one_problem_that_names_it_and_both_sizes(checkpoint: Path) -> None:
    for name, path in each_file(checkpoint):
        saved = path.read_bytes()
        for changed in (saved[:-1], b"", saved + b"\0"):
            path.write_bytes(changed)
            problems = verify_checkpoint(checkpoint)
            assert len(problems) == 1, (name, problems)
            assert f"{name} has {len(changed)} bytes" in problems[0]
            assert str(len(saved)) in problems[0]


def test_a_missing_file_is_one_problem_that_names_it(checkpoint: Path) -> None:
    for name, path in each_file(checkpoint):
        path.unlink()
        problems = verify_checkpoint(checkpoint)
        assert len(problems) == 1, (name, problems)
        assert f"{name} is missing" in problems[0]


def test_a_folder_where_a_file_was_is_one_problem_that_names_it(checkpoint: Path) -> None:
    for name, path in each_file(checkpoint):
        path.unlink()
        path.mkdir()
        problems = verify_checkpoint(checkpoint)
        path.rmdir()
        assert len(problems) == 1, (name, problems)
        assert f"{name} is a folder, where a file should be" in problems[0]


def test_extra_files_are_named_and_empty_folders_are_not(checkpoint: Path) -> None:
    (checkpoint / "model" / "more").mkdir()
    assert verify_checkpoint(checkpoint) == []
    (checkpoint / "model" / "more" / "notes.txt").write_text("mine")
    (checkpoint / ".hidden").write_text("")
    (checkpoint / "index-00009.json").write_text("{}")
    (checkpoint / "link").symlink_to("model")
    assert verify_checkpoint(checkpoint) == [
        ".hidden does not belong to the checkpoint",
        "index-00009.json does not belong to the checkpoint",
        "link does not belong to the checkpoint",
        "model/more/notes.txt does not belong to the checkpoint",
    ]


def test_all_problems_are_told_not_only_the_first(zarr_copy: Path) -> None:
    flip(zarr_copy / "config.yaml", 0)
    flip(zarr_copy / "model" / "big" / "c" / "0", 0)
    (zarr_copy / "rng" / "rank-00000" / "plain.json").unlink()
    (zarr_copy / "extra").write_text("x")
    problems = verify_checkpoint(zarr_copy)
    assert len(problems) == 4
    for name in ("config.yaml", "model/big/c/0", "rng/rank-00000/plain.json", "extra"):
        assert sum(name in problem for problem in problems) == 1


def test_a_bad_block_is_named_with_its_tensor_and_its_bytes(zarr_copy: Path) -> None:
    flip(zarr_copy / "model" / "big" / "c" / "0", BLOCK + 100)
    assert verify_checkpoint(zarr_copy) == [
        f"model: big: bytes {BLOCK} to {4 * BIG} of model/big/c/0 are not those that were saved"
    ]


def test_neighbouring_bad_blocks_are_one_problem(zarr_copy: Path) -> None:
    for at in (BLOCK - 1, BLOCK):
        flip(zarr_copy / "model" / "big" / "c" / "0", at)
    assert verify_checkpoint(zarr_copy) == [
        f"model: big: bytes 0 to {4 * BIG} of model/big/c/0 are not those that were saved"
    ]


def test_a_bad_block_of_small_tensors_names_those_that_lie_in_it(zarr_copy: Path) -> None:
    path = zarr_copy / "model" / "packed-int64-00000" / "c" / "0"
    flip(path, 0)
    assert verify_checkpoint(zarr_copy) == [
        "model: first, second: bytes 0 to 96 of model/packed-int64-00000/c/0 are not those that were saved"
    ]
    path.unlink()
    assert verify_checkpoint(zarr_copy) == ["model: first, second: model/packed-int64-00000/c/0 is missing"]


def test_of_many_tensors_in_one_bad_block_only_a_few_are_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, "zarr", **{f"w{i:02d}": torch.arange(i + 1) for i in range(30)})
    flip(checkpoint / "model" / "packed-int64-00000" / "c" / "0", 3)
    assert verify_checkpoint(checkpoint)[0].startswith("model: w00, w01, w02 and 27 more: bytes 0 to 3720 of ")


def test_a_folder_without_a_manifest_is_no_checkpoint(zarr_copy: Path, tmp_path: Path) -> None:
    (zarr_copy / MANIFEST_NAME).unlink()
    for path in (zarr_copy, tmp_path / "nowhere", zarr_copy / "config.yaml"):
        with pytest.raises(CheckpointNotFoundError, match=f"{path} is not a checkpoint"):
            verify_checkpoint(path)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"format_version": 1'])
def test_a_manifest_that_is_not_one_any_more_is_one_problem(zarr_copy: Path, damage: bytes) -> None:
    (zarr_copy / MANIFEST_NAME).write_bytes(damage)
    (problem,) = verify_checkpoint(zarr_copy)
    assert MANIFEST_NAME in problem


def test_a_checkpoint_of_a_newer_format_is_not_called_damaged(zarr_copy: Path) -> None:
    manifest = read_manifest(zarr_copy)
    manifest.format_version = 2
    (zarr_copy / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    with pytest.raises(ConfigurationError, match="format version 2"):
        verify_checkpoint(zarr_copy)


def test_a_chunk_that_no_index_knows_is_a_problem_even_if_all_digests_are_right(zarr_copy: Path) -> None:
    forge_index(zarr_copy, lambda index: index.chunks.pop("model/big"))
    [problem] = verify_checkpoint(zarr_copy)
    assert problem.startswith("index-00000.json: it lists 0 chunks of 'model/big', of which rank 0 wrote 1")


def test_a_packed_tensor_that_no_index_knows_is_a_problem_even_if_all_digests_are_right(zarr_copy: Path) -> None:
    forge_index(zarr_copy, lambda index: index.pieces.pop("model/second"))
    [problem] = verify_checkpoint(zarr_copy)
    assert problem.startswith(
        "index-00000.json: it lacks packed elements, or has some that it should not have, of 'model/second'"
    )


def test_an_array_of_an_unknown_data_type_is_a_sentence(zarr_copy: Path) -> None:
    manifest = read_manifest(zarr_copy)
    manifest.arrays["model/first"] = replace(manifest.arrays["model/first"], dtype="float3_e1m1")
    (zarr_copy / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    (problem,) = verify_checkpoint(zarr_copy)
    assert "float3_e1m1" in problem


def forge_index(checkpoint: Path, change: Callable[[Index], object]) -> None:
    """Change the index of rank 0 and make the manifest agree, as a save with a bug in it would."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest, 0)
    change(index)
    data = index.to_bytes()
    (checkpoint / index_name(0)).write_bytes(data)
    manifest.files[index_name(0)] = (len(data), digest_of(data))
    (checkpoint / MANIFEST_NAME).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(
    zarr_checkpoint: Path, tmp_path: Path, how: str, at: int
) -> None:
    """As retention does; after any number of files."""
    checkpoint = shutil.copytree(zarr_checkpoint, tmp_path / "copy")
    count = 0

    def remove(_: int) -> None:
        nonlocal count
        if count == at:
            checkpoint.rename(tmp_path / "removed")
            if how == "replaced":
                shutil.copytree(zarr_checkpoint, checkpoint, ignore=shutil.ignore_patterns("c"))
        count += 1

    with pytest.raises(CheckpointGoneError, match="was removed or replaced while it was read"):
        verify_checkpoint(checkpoint, progress=remove)
