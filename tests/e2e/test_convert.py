"""`recipes.convert`: a checkpoint, ours or Megatron-Core's, goes over into another format, or nothing is left of the attempt."""

from __future__ import annotations

import io
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file

import ckpt.dist_checkpointing.serialization
import recipes.convert
import recipes.diff
import recipes.verify
from ckpt import Checkpointer
from ckpt.cli.converting import shard_bytes
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
)
from ckpt.errors import StorageError
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.stored import read_manifest
from tests.e2e.conftest import STEPS, Run
from tests.e2e.runs import checkpoint, run
from tests.golden.megatron.truth import Truth, truth
from tests.support.anonymous_memory import most_anonymous_bytes
from tests.support.covering import covering
from tests.support.dcp_runs import dcp_state, require_equal, run_of, save_by_dcp
from tests.support.states import same_bits
from tests.support.values import same_values

GOLDEN = ("tp2", "dp2", "tp2-dp2", "zero-dim", "old-names")


class Command:
    """A recipe, called as the command line would, in an empty folder in which it leaves nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *overrides: str, recipe: Any = recipes.convert) -> tuple[int, str, str]:
        """Return the exit code and what it printed."""
        self.monkeypatch.setattr(sys, "argv", [recipe.__name__, *overrides])
        self.capsys.readouterr()
        try:
            recipe.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        assert list(Path.cwd().iterdir()) == []
        return code, *self.capsys.readouterr()

    def refused(self, *overrides: str) -> str:
        """The one sentence of a call that fails."""
        code, out, err = self(*overrides)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        return err.rstrip("\n")


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Command(monkeypatch, capsys)


@pytest.fixture
def tp2(tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(truth("tp2").path, tmp_path / "tp2")


def overrides_of(src: Path, dst: Path, *more: str) -> Sequence[str]:
    return f"src={src}", f"dst={dst}", "load.allow_pickle=true", *more


def require_all_of(expected: Truth, dst: Path, common: dict[str, Any]) -> None:
    """Load every tensor, object and common entry by the first reference's entry points, and compare all bits."""
    tensors = load_plain_tensors(dst)
    assert tensors.keys() == expected.tensors.keys()
    assert all(same_bits(tensors[key], tensor) for key, tensor in expected.tensors.items())
    objects = {key: ShardedObject.empty_from_unique_key(key) for key in expected.objects}
    loaded = load({"objects": objects}, dst)
    assert isinstance(loaded, dict)
    assert same_values(loaded.pop("objects", {}), expected.objects)
    assert same_values(loaded, common) and same_values(load_common_state_dict(dst), common)
    assert load_sharded_metadata(dst).keys() == {*expected.tensors, *expected.objects}


@covering({"name": GOLDEN, "to": ["zarr", "tensorstore"]}, default=1)
def test_what_megatron_core_saved_loads_as_ours_to_the_bit(
    convert: Command, tmp_path: Path, name: str, to: str
) -> None:
    """S1.80: every checkpoint that the real one wrote, into both formats."""
    expected, dst = truth(name), tmp_path / "new"
    before = sorted(expected.path.rglob("*"))
    code, out, err = convert(*overrides_of(expected.path, dst, f"to={to}", "json=true", "leave_out_unknown=true"))
    assert (code, err) == (0, "")
    said = json.loads(out)
    if name == "tp2-dp2":
        assert said["left_out"] == ["common.pt: args.model_type (megatron.core.enums.ModelType)"]
        del expected.common["args"].model_type
    else:
        assert said["left_out"] == []
    require_all_of(expected, dst, expected.common)
    assert (said["arrays"], said["objects"]) == (len(expected.tensors), len(expected.objects))
    assert said["array_bytes"] == sum(tensor.nbytes for tensor in expected.tensors.values())
    assert (said["common"], said["changed"]) == (list(expected.common), [])
    assert (dst / "arrays.ocdbt").is_dir() == (to == "tensorstore")
    assert said["num_files"] == sum(path.is_file() for path in dst.rglob("*"))
    assert sorted(expected.path.rglob("*")) == before, "the old one is left as it is"
    assert convert(f"path={dst}", recipe=recipes.verify)[0] == 0


def test_a_converted_checkpoint_is_cut_as_the_next_run_needs_it(convert: Command, tmp_path: Path) -> None:
    expected = truth("tp2")
    assert convert(*overrides_of(expected.path, tmp_path / "new"))[0] == 0
    key = "model.decoder.layers.self_attention.linear_proj.weight"
    wanted = ShardedTensor.from_rank_offsets(
        key, torch.empty(4, 2, dtype=torch.bfloat16), (0, 1, 3), (2, 2, 3), prepend_axis_num=1
    )
    loaded = load({"w": wanted}, tmp_path / "new", validate_access_integrity=False)
    assert isinstance(loaded, dict)
    assert same_bits(loaded["w"], expected.tensors[key][1, :, 4:].contiguous())


def test_it_tells_what_went_over_and_what_did_not(convert: Command, tp2: Path, tmp_path: Path) -> None:
    common = truth("tp2").common
    common["args"].save = Path("/old/run")
    common["args"].deep = [1, {"x": range(3)}]
    torch.save(common, tp2 / "common.pt")
    (tp2 / "tokenizer.model").write_bytes(b"?")
    code, out, err = convert(*overrides_of(tp2, tmp_path / "new", "leave_out_unknown=true"))
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith(f"{tp2} is now {tmp_path}/new, in zarr; ") and first.endswith(", read back and right")
    assert lines == [
        "  arrays   22, 1.9 kB",
        "  objects  9",
        f"  common   {', '.join(common)}",
        "  changed  common.pt: args.save: the text '/old/run', was a PosixPath",
        "  left out tokenizer.model (of no known meaning)",
        "  left out common.pt: args.deep[1].x (builtins.range)",
    ]
    args = load_common_state_dict(tmp_path / "new")["args"]
    assert (args.save, args.deep) == ("/old/run", [1, {}])


def test_a_namespace_that_holds_a_tensor_goes_over(convert: Command, tp2: Path, tmp_path: Path) -> None:
    common = truth("tp2").common
    common["args"].mask = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    common["args"].deep = [types.SimpleNamespace(scale=torch.tensor(0.5), name="x")]
    torch.save(common, tp2 / "common.pt")
    assert convert(*overrides_of(tp2, tmp_path / "new"))[0] == 0
    require_all_of(truth("tp2"), tmp_path / "new", common)


def test_values_that_only_the_old_program_has_are_refused_by_name_or_left_out(
    convert: Command, tp2: Path, tmp_path: Path
) -> None:
    torch.save({"list": [1, range(2)], "key": {range(3): 1}, "set": {1}}, tp2 / "common.pt")
    torch.save(range(4), tp2 / "bytes" / "shard_0_1.pt")
    said = convert.refused(*overrides_of(tp2, tmp_path / "new"))
    assert said == (
        f"{tp2} holds values of classes that are not built here: common.pt: list[1] (builtins.range), common.pt: list (all of this "
        "list), common.pt: key (a key) (builtins.range), bytes/shard_0_1 (builtins.range). Leave them out with leave_out_unknown=true"
    )
    assert convert(*overrides_of(tp2, tmp_path / "new", "leave_out_unknown=true"))[0] == 0
    assert load_common_state_dict(tmp_path / "new") == {"key": {}, "set": {1}}
    assert "bytes/shard_0_1" not in load_sharded_metadata(tmp_path / "new")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["dst=new"], "no src is given; add src=<the old checkpoint>"),
        (["src={src}"], "no dst is given; add dst=<a folder for the new one>"),
        (
            ["src={src}", "dst={dst}"],
            "{src}/common.pt is a pickle, which is read only where that is asked for: load with "
            "load.allow_pickle=true. Then",
        ),
        (
            ["src={src}", "dst={dst}", "to=npz"],
            "to=npz is not known; choose zarr, tensorstore, kimi-engine, safetensors, dcp or torch",
        ),
        (["src={src}/no", "dst={dst}"], "{src}/no does not exist"),
        (
            ["src={src}/..", "dst={dst}"],
            "{src}/.. is no checkpoint: it has neither a checkpoint_manifest.json, as ours have, ",
        ),
        (
            ["src={src}", "dst={dst}", "to=kimi-engine"],
            "{src} is a sharded state dict of Megatron-Core's, which to=kimi-engine cannot hold: choose to=zarr",
        ),
        (
            ["src={src}", "dst={dst}", "to=safetensors", "component=decoder"],
            "{src} holds no tensor of component=decoder; it has 6 (bits, folder/of/weight, model, ",
        ),
        (
            ["src={src}", "dst={dst}", "max_shard_size=5XB"],
            "max_shard_size=5XB: expected a size such as 5GB or 500MiB, or ",
        ),
        (["src={src}", "dst={dst}", "max_shard_size=0"], "max_shard_size=0: expected a size such as 5GB or 500MiB, or "),
        (["src={src}", "dst={src}", "load.allow_pickle=true"], "{src} is a folder that is not empty; "),
        (["src={src}", "dst={src}/common.pt", "load.allow_pickle=true"], "{src}/common.pt is no folder"),
        (
            ["src={src}", "dst={dst}", "to=safetensors", "config_from={src}"],
            "config_from={src} has no config.json; give a folder that config.save_pretrained wrote, or a snapshot of Hugging",
        ),
        (["src={src}", "dst={dst}", "config_from={src}"], "config_from={src} is for to=safetensors; leave it out"),
        (["src={src}", "dst={dst}", "load.pickle=true"], "load.pickle: there is no such key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_makes_nothing(
    convert: Command, tp2: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    places = {"src": tp2, "dst": tmp_path / "new"}
    said = convert.refused(*(override.format(**places) for override in overrides))
    assert said.startswith(sentence.format(**places))
    assert said.endswith(f"; below it there is {tp2}/../tp2") == (overrides[0] == "src={src}/..")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_is_a_free_destination_and_what_came_of_it_goes_on_into_other_formats(
    convert: Command, tp2: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    assert convert(*overrides_of(tp2, tmp_path / "new"))[0] == 0
    code, out, err = convert(f"src={tmp_path / 'new'}", f"dst={tmp_path / 'newer'}", "to=tensorstore", "json=true")
    assert (code, err) == (0, "")
    assert json.loads(out)["components"] == ["sharded"]
    require_all_of(truth("tp2"), tmp_path / "newer", truth("tp2").common)
    said = convert.refused(f"src={tmp_path / 'new'}", f"dst={tmp_path / 'no'}", "to=kimi-engine")
    assert "sharded state dict" in said and "zarr or tensorstore" in said


@pytest.mark.parametrize("damage", ["chunk", "metadata", "object", "common", "full disk", "wrong bytes", "Ctrl-C"])
def test_a_conversion_that_fails_leaves_nothing(
    convert: Command, tp2: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {
        "chunk": "types.int16: chunk 1.0 is missing",
        "metadata": "types.int16: {src}/types.int16 holds chunks of an array, and its .zarray is missing",
        "object": "{src}/bytes/shard_0_1.pt cannot be read",
        "common": "{src}/common.pt does not exist",
        "full disk": "convert to {dst}: save into ",
        "wrong bytes": "convert to {dst}: what was written for {dst} is not what is read back: sharded: folder/of/weight: bytes 0 to ",
        "Ctrl-C": "interrupted",
    }[damage]
    if damage in ("full disk", "wrong bytes", "Ctrl-C"):
        monkeypatch.setattr("ckpt.cli.converting_megatron.save", _broken_save(damage))
    else:
        names = {"chunk": "types.int16/1.0", "metadata": "types.int16/.zarray", "common": "common.pt"}
        (tp2 / names.get(damage, "bytes/shard_0_1.pt")).unlink()
        if damage == "object":
            (tp2 / "bytes" / "shard_0_1.pt").write_bytes(b"PK\x03\x04")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = convert(*overrides_of(tp2, tmp_path / "new", "json=true"))
    assert (code, out) == ({"Ctrl-C": 130, "full disk": 2, "wrong bytes": 2}.get(damage, 1), "")
    assert err.startswith(says.format(src=tp2, dst=tmp_path / "new")), err
    assert sorted(tmp_path.rglob("*")) == before


def _broken_save(how: str) -> Any:
    """A save that fails in the middle, or changes a byte afterwards."""

    def save(state: Any, folder: Path, strategy: Any) -> None:
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        if how == "full disk":
            (folder / "sharded").mkdir()
            raise StorageError(f"save into {folder}: No space left on device")
        ckpt.dist_checkpointing.serialization.save(state, folder, strategy)
        (chunk,) = folder.glob("sharded/folder*weight/c/0/0")
        chunk.write_bytes(bytes(chunk.stat().st_size))

    return save


def test_help_says_what_it_does_and_names_every_key(convert: Command) -> None:
    code, shown, err = convert("--help")
    assert (code, err) == (0, "")
    assert shown.startswith("python -m recipes.convert writes a checkpoint in another format")
    for key in (
        "src=???",
        "dst=???",
        "to=zarr",
        "component=model",
        "max_shard_size=5GB",
        "config_from=null",
        "load.allow_pickle=false",
        "leave_out_unknown=false",
        "launch.nproc_per_node=1",
        "json=false",
    ):
        assert key in shown


def test_a_run_goes_on_to_the_bit_from_a_checkpoint_that_went_through_all_formats(
    convert: Command, tmp_path: Path, straight: Run
) -> None:
    path = checkpoint(straight.dir, STEPS - 2)
    for to in ("kimi-engine", "tensorstore", "zarr", "kimi-engine"):
        code, out, err = convert(f"src={path}", f"dst={tmp_path / to / path.name}", f"to={to}", "json=true")
        assert (code, err) == (0, "")
        said, path = json.loads(out), tmp_path / to / path.name
        assert said["components"] == list(read_manifest(path).components)
        assert said["num_files"] == sum(file.is_file() for file in path.rglob("*"))
        if to == "zarr":
            shutil.rmtree(tmp_path / "kimi-engine")
    assert convert(f"path={path}", recipe=recipes.verify)[0] == 0
    resumed = run(tmp_path / "run", f"train.steps={STEPS}", f"resume={path}", "ckpt=zarr", ranks=2)
    assert resumed["losses"] == straight.summary["losses"][-2:]
    assert resumed["state_digest"] == straight.summary["state_digest"]


def test_a_model_becomes_a_plain_file_that_a_model_is_made_of(convert: Command, tmp_path: Path, straight: Run) -> None:
    src, dst = checkpoint(straight.dir, STEPS), tmp_path / "plain"
    code, out, err = convert(f"src={src}", f"dst={dst}", "to=safetensors")
    assert (code, err) == (0, "")
    first, tensors, *others = out.splitlines()
    assert first.startswith(f"{src} is now {dst}, in safetensors; 1 file, ") and first.endswith(
        ", read back and right"
    )
    assert tensors.startswith("  tensors  ") and tensors.endswith(", of component model")
    assert others == []
    found = load_file(dst / "model.safetensors")
    for name, entry in read_manifest(src).arrays_of("model").items():
        assert (name in found) == (entry.alias_of is None)
        if name in found and entry.path is not None:
            values = zarr.open_array(src / entry.path, mode="r")[...]
            assert np.asarray(values).tobytes() == found[name].numpy().tobytes()
    code, out, _ = convert(
        f"src={src}", f"dst={tmp_path / 'cut'}", "to=safetensors", "max_shard_size=200KB", "json=true"
    )
    names = json.loads(out)["files"]
    assert code == 0 and len(names) > 2
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == sorted(
        [*names, "model.safetensors.index.json"]
    )
    cut = {key: value for name in names for key, value in load_file(tmp_path / "cut" / name).items()}
    assert cut.keys() == found.keys() and all(same_bits(cut[key], found[key]) for key in cut)


@pytest.mark.parametrize("to", ["zarr", "tensorstore", "kimi-engine", "safetensors", "torch", "megatron"])
def test_every_conversion_moves_a_bar_to_its_end(
    convert: Command, tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    in_all, moved = 0, 0

    @contextmanager
    def bar(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        nonlocal in_all
        assert what.endswith(f": {tmp_path / 'new'}")
        in_all += num_bytes
        yield count

    def count(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes

    monkeypatch.setattr("ckpt.cli.converting.progress_bar", bar)
    if to == "megatron":
        command = list(overrides_of(tp2, tmp_path / "new"))
    else:
        with Checkpointer(tmp_path / "own", model=torch.nn.Linear(300, 400), save_rng=False) as checkpoints:
            command = [f"src={checkpoints.save(1)}", f"dst={tmp_path / 'new'}", f"to={to}"]
    code, _, err = convert(*command)
    assert (code, err) == (0, "") and in_all > 0
    assert moved > 0.9 * in_all
    assert moved < 1.2 * in_all or to == "megatron", "the golden tensors are smaller than their metadata"


def test_tensors_of_megatron_core_become_a_plain_file_and_its_pickles_are_not_read(
    convert: Command, tp2: Path, tmp_path: Path
) -> None:
    for pickled in tp2.rglob("*.pt"):
        pickled.write_bytes(b"?")
    command = f"src={tp2}", f"dst={tmp_path / 'plain'}", "to=safetensors", "json=true"
    code, out, err = convert(*command, "component=optimizer")
    assert (code, err) == (0, "")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    wanted = {
        key.removeprefix("optimizer."): one for key, one in truth("tp2").tensors.items() if key.startswith("optimizer.")
    }
    assert found.keys() == wanted.keys() and json.loads(out)["tensors"] == len(wanted) > 0
    assert all(same_bits(found[key], value) for key, value in wanted.items())


def test_tied_weights_stay_tied(convert: Command, tmp_path: Path) -> None:
    def tied() -> torch.nn.Sequential:
        net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
        net[1].weight = net[0].weight
        return net

    net = tied()
    torch.save({"model": net.state_dict()}, tmp_path / "net.pt")
    code, _, err = convert(f"src={tmp_path / 'net.pt'}", f"dst={tmp_path / '100'}", "load.allow_pickle=true")
    assert code == 0, err
    assert read_manifest(tmp_path / "100").arrays["state/model.1.weight"].alias_of == "state/model.0.weight"
    fresh = tied()
    Checkpointer(tmp_path / "root", model=fresh, save_rng=False).restore(tmp_path / "100")
    assert same_bits(fresh[0].weight, net[0].weight) and fresh[1].weight is fresh[0].weight


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("5GB", 5_000_000_000),
        ("1.5GiB", 3 << 29),
        ("20 kb", 20_000),
        ("7", 7),
        ("3B", 3),
        ("2TiB", 2 << 40),
        (None, 1 << 62),
    ],
)
def test_a_size_is_read_as_hugging_face_does(size: str | None, num_bytes: int) -> None:
    assert shard_bytes(size) == num_bytes


def anonymous_bytes(src: Path, dst: Path, to: str) -> int:
    """The most anonymous memory that a conversion takes on top."""
    imports = """
from ckpt.ranks.topology import Topology
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
"""
    measured = """
keys = ConvertKeys(src=sys.argv[1], dst=sys.argv[2], to=sys.argv[3], load=LoadKeys(allow_pickle=True))
convert_on_ranks(run_of(keys), Topology.alone())
"""
    return most_anonymous_bytes(imports, measured, src, dst, to)


@pytest.mark.full
@pytest.mark.parametrize("to", ["zarr", "tensorstore"])
def test_no_memory_of_the_size_of_the_checkpoint_is_needed(tmp_path: Path, to: str) -> None:
    """128 MiB in 16 chunks, of which each copy in memory would take 8."""
    src = tmp_path / "src"
    (src / "w").mkdir(parents=True)
    (src / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    torch.save({"iteration": 1}, src / "common.pt")
    metadata = {"shape": [4096, 8192], "chunks": [1024, 2048], "dtype": "<f4", "zarr_format": 2, "order": "C"}
    (src / "w" / ".zarray").write_text(json.dumps(metadata | dict.fromkeys(("compressor", "filters", "fill_value"))))
    random = np.random.default_rng(0)
    for number in range(16):
        random.random(1024 * 2048, np.float32).tofile(src / "w" / f"{number // 4}.{number % 4}")
    assert anonymous_bytes(src, tmp_path / "dst", to) < 40 << 20


@pytest.mark.full
@pytest.mark.parametrize("to", ["zarr", "tensorstore", "kimi-engine", "safetensors", "dcp", "torch"])
def test_a_checkpoint_of_another_program_needs_none_either(tmp_path: Path, to: str) -> None:
    """2 GiB in 64 tensors."""
    save_by_dcp({"model": {f"w{number}": torch.rand(8, 1 << 20) for number in range(64)}}, tmp_path / "dcp")
    assert anonymous_bytes(tmp_path / "dcp", tmp_path / "dst", to) < 256 << 20


def test_a_checkpoint_of_dcp_goes_over_and_back_on_two_ranks(convert: Command, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(1 << 21).reshape(1024, -1)}, "optimizer": {"lr": 0.1}}
    save_by_dcp(state, tmp_path / "dcp")
    code, out, err = convert(
        f"src={tmp_path / 'dcp'}", f"dst={tmp_path / 'ours'}", "load.allow_pickle=true", "json=true"
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["components"], told["arrays"], told["array_bytes"]) == (["model", "optimizer"], 1, 16 << 20)
    assert convert(f"src={tmp_path / 'ours'}", f"dst={tmp_path / 'new'}", "to=dcp", "launch.nproc_per_node=2")[0] == 0
    assert len([*(tmp_path / "new").glob("*.distcp")]) == 2
    assert (
        convert(f"a={tmp_path / 'dcp'}", f"b={tmp_path / 'new'}", "load.allow_pickle=true", recipe=recipes.diff)[0] == 0
    )


def test_a_run_goes_on_from_what_the_command_made_of_an_optimizer_of_dcp(convert: Command, tmp_path: Path) -> None:
    saved, live = run_of(0), run_of(1)
    save_by_dcp(dcp_state(saved), tmp_path / "step-12")
    assert convert(f"src={tmp_path / 'step-12'}", f"dst={tmp_path / '12'}", "load.allow_pickle=true")[0] == 0
    with Checkpointer(tmp_path / "own", **live, save_rng=False) as checkpoints:
        assert checkpoints.restore(tmp_path / "12") == 12
    require_equal(live, saved)


def test_a_wrong_number_of_ranks_and_pickles_that_are_not_allowed_make_nothing(
    convert: Command, tmp_path: Path
) -> None:
    save_by_dcp({"model": {"w": torch.arange(5)}}, tmp_path / "dcp")
    told = convert.refused(f"src={tmp_path / 'dcp'}", f"dst={tmp_path / 'x'}", "launch.nproc_per_node=0")
    assert "launch.nproc_per_node=0: expected at least 1" in told
    assert "load.allow_pickle=true" in convert.refused(f"src={tmp_path / 'dcp'}", f"dst={tmp_path / 'x'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "here"]


def test_extra_state_of_transformer_engine_comes_over_as_the_bytes_it_is(convert: Command, tmp_path: Path) -> None:
    assert convert(*overrides_of(truth("tp2").path, tmp_path / "new"))[0] == 0
    one = ShardedObject("model.decoder.layers.self_attention.linear_qkv._extra_state", None, (3,), (1,))
    loaded = load({"x": one}, tmp_path / "new", validate_access_integrity=False)
    assert isinstance(loaded, dict) and isinstance(loaded["x"], io.BytesIO)
    assert loaded["x"].getvalue() == b"scales of layer 1"
