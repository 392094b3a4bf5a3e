"""`recipes.convert`: what Megatron-Core's zarr strategy wrote becomes a checkpoint of ours, or nothing is left of the attempt."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt.serialization
import recipes.convert
import recipes.verify
from ckpt.errors import StorageError
from ckpt.mapping import ShardedObject, ShardedTensor
from ckpt.serialization import load, load_common_state_dict, load_plain_tensors, load_sharded_metadata
from tests.golden.megatron.truth import Truth, truth
from tests.states import same_bits
from tests.values import same_values

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
        assert (code, out, err.count("\n")) == (1, "", 1), err
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


@pytest.mark.parametrize("to", ["zarr", "tensorstore"])
@pytest.mark.parametrize("name", GOLDEN)
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
    assert first.startswith(f"{tp2} is now {tmp_path}/new, for to=zarr; ") and first.endswith(", read back and right")
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


def test_values_that_only_the_old_program_has_are_refused_by_name_or_left_out(
    convert: Command, tp2: Path, tmp_path: Path
) -> None:
    torch.save({"list": [1, range(2)], "key": {range(3): 1}, "set": {1}}, tp2 / "common.pt")
    torch.save(range(4), tp2 / "bytes" / "shard_0_1.pt")
    said = convert.refused(*overrides_of(tp2, tmp_path / "new"))
    assert said == (
        f"{tp2} holds values of classes that are not built here: common.pt: list[1] (builtins.range); common.pt: list (all of this "
        "list); common.pt: key (a key) (builtins.range); bytes/shard_0_1 (builtins.range). Go on without them with "
        "leave_out_unknown=true, which says which they were."
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
            "{src}/common.pt is a pickle, which is read only where that is asked for: load with allow_pickle=True, or "
            "load.allow_pickle=true",
        ),
        (["src={src}", "dst={dst}", "to=npz"], "to=npz is not known; choose zarr or tensorstore"),
        (["src={src}/no", "dst={dst}"], "src={src}/no does not exist"),
        (["src={src}/..", "dst={dst}"], "src={src}/.. is no checkpoint that Megatron-Core's zarr strategy wrote: "),
        (["src={src}", "dst={src}", "load.allow_pickle=true"], "dst={src} exists and is not empty; choose another, "),
        (["src={src}", "dst={src}/common.pt", "load.allow_pickle=true"], "dst={src}/common.pt exists and is not empty"),
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
    assert said.endswith(f"; below it there is src={tp2}/../tp2") == (overrides[0] == "src={src}/..")
    assert sorted(tmp_path.rglob("*")) == before


def test_one_of_ours_is_no_source_and_an_empty_folder_is_a_free_destination(
    convert: Command, tp2: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    assert convert(*overrides_of(tp2, tmp_path / "new"))[0] == 0
    said = convert.refused(*overrides_of(tmp_path / "new", tmp_path / "newer"))
    assert "is no checkpoint that Megatron-Core's zarr strategy wrote" in said and "or it is one of ours" in said


@pytest.mark.parametrize("damage", ["chunk", "metadata", "object", "common", "full disk", "wrong bytes", "Ctrl-C"])
def test_a_conversion_that_fails_leaves_nothing(
    convert: Command, tp2: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {
        "chunk": "types.int16: chunk 1.0 is missing",
        "metadata": "types.int16: {src}/types.int16 holds chunks of an array, and its .zarray is missing",
        "object": "{src}/bytes/shard_0_1.pt cannot be read",
        "common": "{src}/common.pt is missing",
        "full disk": "save into ",
        "wrong bytes": "what was written for {dst} is not what is read back: sharded: folder/of/weight: bytes 0 to 24 of ",
        "Ctrl-C": "interrupted",
    }[damage]
    if damage in ("full disk", "wrong bytes", "Ctrl-C"):
        monkeypatch.setattr("recipes.converting.save", _broken_save(damage))
    else:
        names = {"chunk": "types.int16/1.0", "metadata": "types.int16/.zarray", "common": "common.pt"}
        (tp2 / names.get(damage, "bytes/shard_0_1.pt")).unlink()
        if damage == "object":
            (tp2 / "bytes" / "shard_0_1.pt").write_bytes(b"PK\x03\x04")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = convert(*overrides_of(tp2, tmp_path / "new", "json=true"))
    assert (code, out) == (130 if damage == "Ctrl-C" else 1, "")
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
        ckpt.serialization.save(state, folder, strategy)
        (chunk,) = folder.glob("sharded/folder*weight/c/0/0")
        chunk.write_bytes(bytes(chunk.stat().st_size))

    return save


def test_help_says_what_it_does_and_names_every_key(convert: Command) -> None:
    code, shown, err = convert("--help")
    assert (code, err) == (0, "")
    assert shown.startswith("python -m recipes.convert reads a checkpoint that Megatron-Core wrote")
    for key in ("src: ???", "dst: ???", "to: zarr", "allow_pickle: false", "leave_out_unknown: false", "json: false"):
        assert key in shown


_MEASURED = """
import sys, threading
from recipes.converting import ConvertKeys, LoadKeys, convert

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not ended.wait(0.002):
        seen.append(anonymous())

ended, seen = threading.Event(), [anonymous()]
watcher = threading.Thread(target=watch)
watcher.start()
convert(ConvertKeys(src=sys.argv[1], dst=sys.argv[2], to=sys.argv[3], load=LoadKeys(allow_pickle=True)))
ended.set()
watcher.join()
print(max(seen) - seen[0])
"""


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
    root = str(Path(recipes.convert.__file__).parent.parent)
    command = [sys.executable, "-c", _MEASURED, str(src), str(tmp_path / "dst"), to]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 40 << 20


def test_extra_state_of_transformer_engine_comes_over_as_the_bytes_it_is(convert: Command, tmp_path: Path) -> None:
    assert convert(*overrides_of(truth("tp2").path, tmp_path / "new"))[0] == 0
    one = ShardedObject("model.decoder.layers.self_attention.linear_qkv._extra_state", None, (3,), (1,))
    loaded = load({"x": one}, tmp_path / "new", validate_access_integrity=False)
    assert isinstance(loaded, dict) and isinstance(loaded["x"], io.BytesIO)
    assert loaded["x"].getvalue() == b"scales of layer 1"
