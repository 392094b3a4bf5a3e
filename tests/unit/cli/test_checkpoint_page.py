"""The page of a checkpoint says what its manifest says, of any names, and stays small."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.incremental import DiskUse
from ckpt.cli.pages import inspect_page
from ckpt.cli.pages.checkpoint_page import checkpoint_values
from ckpt.cli.pages.page import page
from ckpt.errors import CorruptCheckpointError
from ckpt.format.manifest import ArrayEntry, CheckpointManifest
from ckpt.ranks.topology import Topology
from tests.support.pages import HOSTILE, SHOWN, Element, manifest, parsed, rows, whole
from tests.support.states import Held, coordinator

TEXT = "<script>alert(2)</script><img src=x onerror=alert(2)>\"'&\x1b\u202e\ud800"
TEXT_SHOWN = "<script>alert(2)</script><img src=x onerror=alert(2)>\"'&\\x1b\\u202e\\ud800"


def page_of(made: CheckpointManifest) -> Element:
    return parsed(text_of(made))


def text_of(made: CheckpointManifest) -> str:
    return page("inspect.html", "checkpoint", checkpoint=checkpoint_values({"": made}, DiskUse(5000, 1000)))


def test_every_tensor_and_component_is_there_with_its_bytes() -> None:
    arrays = {
        "model/big": rows((100, 50)),
        "model/small": ArrayEntry("bfloat16", (7,), "zarr", packed_in=(0, 1)),
        "model/tied": ArrayEntry("float32", (100, 50), alias_of="model/big"),
        "optimizer/avg": whole("float32", (10, 10), rank=1),
        "optimizer/step": ArrayEntry("int64", (), "zarr", packed_in=(0,)),
    }
    made = manifest(arrays, metrics={"loss": 2.5, "norm": None})
    found = page_of(made)
    tensors = {row["tensor"].text: row for row in found.rows("tensors")}
    assert list(tensors) == ["model/big", "optimizer/avg", "model/small", "optimizer/step", "model/tied"]
    for name, entry in arrays.items():
        assert tensors[name]["dtype"].text == entry.dtype
        assert tensors[name]["size"].attributes["data-value"] == str(0 if entry.alias_of else entry.num_bytes)
    assert tensors["model/big"]["shape"].text == "100 x 50" and tensors["optimizer/step"]["shape"].text == "scalar"
    assert tensors["model/tied"]["written"].text == "is model/big"
    assert tensors["model/small"]["written"].text == "packed by ranks 0-1"
    components = {row["component"].text: row for row in found.rows("components")}
    assert {key: row["size"].attributes["data-value"] for key, row in components.items()} == {
        key: str(one.size_bytes) for key, one in made.components.items()
    }
    assert [components[key]["tensors"].text for key in ("model", "optimizer")] == ["3", "2"]
    facts = {one.all("dt")[0].text: one.all("dd")[0].text for one in found.all("dl")[0].all("div")}
    assert facts["committed (UTC)"] == "2026-11-24 03:04:05" and facts["ranks"] == "2" and facts["tensors"] == "5"
    assert (facts["loss"], facts["norm"], facts["in files"], facts["files of its own"]) == (
        "2.5",
        "-",
        "5.0 kB",
        "1.0 kB",
    )
    assert found.texts("groups") == [{"group": "data_parallel", "instances": "1", "ranks of each": "[0, 1]"}]


def part(one: Element, side: str) -> float:
    """A length of an element, as a part of the element around it."""
    styles = dict(style.split(":") for style in (one.attributes["style"] or "").split(";"))
    return float(styles[side].rstrip("%")) / 100


def areas(treemap: Element) -> dict[str, float]:
    """The area of each tile of a treemap, as a part of the whole, by the first line of its tip."""
    return {
        str(tile.attributes["data-tip"]).splitlines()[0]: math.prod(
            part(one, side) for one in (region, tile) for side in ("width", "height")
        )
        for region in treemap.all("div", "region")
        for tile in region.all("a")
    }


def test_the_treemap_has_the_bytes_as_areas_and_leads_to_pictures() -> None:
    arrays = {"model/a.b_c": rows((300, 10)), "model/b": rows((200, 10)), "optimizer/c": whole("float32", (500, 10))}
    (treemap,) = page_of(manifest(arrays)).all("div", "treemap")
    found = areas(treemap)
    assert found["model/a.b_c"] / found["model/b"] == pytest.approx(1.5, rel=1e-3)
    assert found["optimizer/c"] == pytest.approx(found["model/a.b_c"] + found["model/b"], rel=1e-3)
    assert sum(found.values()) == pytest.approx(1, rel=1e-3)
    tiles = {tile.all("span")[0].text: tile for tile in treemap.all("a")}
    assert {name: tile.attributes.get("href") for name, tile in tiles.items()} == {"c": None, "a.b_c": "#cut-0", "b": "#cut-0"}
    assert [tile.all("small")[0].text for tile in tiles.values()] == ["20.0 kB", "12.0 kB", "8.0 kB"]
    assert {one.text for one in treemap.all("b")} == {"model  20.0 kB, 50%", "optimizer  20.0 kB, 50%"}
    assert tiles["a.b_c"].all("span")[0].inside[::2] == ["a.", "b_", "c"], "names are broken behind dots and low lines"


def test_each_box_names_its_writer_and_each_rank_its_bytes() -> None:
    found = page_of(
        manifest({"model/a": rows((300, 10), 3), "model/b": whole("float32", (100, 10), rank=2)}, world_size=3)
    )
    (picture,) = found.all("div", "picture")
    assert [one.attributes["data-tip"] for one in picture.all("i")] == [
        "rank 0 wrote [0:100, 0:10]",
        "rank 1 wrote [100:200, 0:10]",
        "rank 2 wrote [200:300, 0:10]",
    ]
    assert [one.text for one in picture.all("i")] == ["0", "1", "2"]
    assert [part(one, "top") for one in picture.all("i")] == pytest.approx([0, 1 / 3, 2 / 3], abs=1e-5)
    assert [part(one, "height") for one in picture.all("i")] == pytest.approx([1 / 3] * 3, abs=1e-5)
    (card,) = found.all("article")
    assert card.attributes["id"] == "cut-0" and card.all("h3")[0].text == "3 ranks along dimension 0"
    assert [one.text for one in card.all("li")] == ["model/a (300 x 10)"]
    (columns,) = found.all("div", "columns")
    assert [one.attributes["data-tip"] for one in columns.all("i")] == [
        "rank 0: 4.0 kB",
        "rank 1: 4.0 kB",
        "rank 2: 8.0 kB",
    ]
    assert [part(one, "height") for one in columns.all("i")] == [0.5, 0.5, 1]
    assert [one.text for one in columns.all("i")] == ["rank 0", "rank 1", "rank 2"]


def test_a_hostile_name_is_shown_and_never_run() -> None:
    entry = replace(rows((300, 10)), store=TEXT, path=TEXT)  # type: ignore[arg-type]
    made = manifest({HOSTILE: rows((300, 10)), "model/x": whole("float32", (1,)), "model/y": entry}, metrics={TEXT: 1.0})
    made.components = {TEXT: replace(made.components["model"], group_name=TEXT, sharing_pattern=TEXT)}  # type: ignore[arg-type]
    made.checkpoint_id = made.ckpt_version = made.pytorch_version = TEXT
    made.topology = {"groups": {TEXT: [[TEXT]]}}
    text = text_of(made)
    found = parsed(text)
    assert "<img" not in text and text.count("<script>") == 1
    tensors = {row["tensor"]: row for row in found.texts("tensors")}
    assert SHOWN in tensors
    assert tensors["model/y"]["written"].startswith(f"{TEXT_SHOWN} {TEXT_SHOWN} by ")
    (component,) = found.texts("components")
    assert component["component"] == component["group"] == component["pattern"] == TEXT_SHOWN
    facts = {one.all("dt")[0].text: one.all("dd")[0].text for one in found.all("dl")[0].all("div")}
    assert [facts[name] for name in ("checkpoint id", "ckpt", "torch", TEXT_SHOWN)] == [*[TEXT_SHOWN] * 3, "1"]
    assert found.texts("groups") == [{"group": TEXT_SHOWN, "instances": "1", "ranks of each": f"[{TEXT_SHOWN}]"}]
    assert any(tip.startswith(f"{SHOWN}\n") for tip in found.tips())
    listed = [one.text for card in found.all("article") for one in card.all("li")]
    assert f"{SHOWN} (300 x 10)" in listed
    text.encode()


def test_hostile_names_of_a_folder_of_its_metrics_and_an_error_are_shown_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "<img src=x onerror=alert(1)>\u202e"
    run = coordinator(Topology.alone(), root, [StateComponent("model", Held({"w": torch.zeros(20_000)}), "replicated")])
    for checkpoint_id in ("1", "2"):
        run.save_checkpoint(checkpoint_id=checkpoint_id)
    made = manifest({"model/w": rows((300, 10))}, metrics={TEXT: 2.5})
    made.components[TEXT] = made.components["model"]

    def read(path: Path) -> CheckpointManifest:
        if path.name == "checkpoint-2":
            raise CorruptCheckpointError(TEXT)
        return replace(made)

    monkeypatch.setattr(inspect_page, "read_manifest", read)
    text = inspect_page.folder_page(root)
    found = parsed(text)
    assert "<img" not in text and text.count("<script>") == 1
    assert found.all("h1")[0].text == "Checkpoints of <img src=x onerror=alert(1)>\\u202e"
    first, second = found.texts("checkpoints")
    assert (first["components"], first[TEXT_SHOWN]) == (f"model, {TEXT_SHOWN}", "2.5")
    assert second["ranks"].startswith(f"damaged: {TEXT_SHOWN}")
    text.encode()


def test_twenty_thousand_tensors_on_many_ranks_make_a_page_of_less_than_a_megabyte() -> None:
    arrays = {
        f"{part}/layers.{layer}.block.{name}": rows((1024 * (1 + layer % 9), 64 + len(name)), 256)
        for part in ("model", "optimizer")
        for layer in range(1000)
        for name in ("q", "key", "value", "out", "up", "down", "gate_1", "norm_2", "bias_22", "scale")
    }
    text = text_of(manifest(arrays, world_size=256))
    assert len(text) < 1_000_000
    found = parsed(text)
    shown = found.rows("tensors")
    assert sum(int(row["size"].attributes["data-value"] or 0) for row in shown) == sum(
        one.num_bytes for one in arrays.values()
    )
    assert len(shown) == 20 and {row["tensor"].all("small")[0].text for row in shown} == {" 1,000 tensors"}
    assert shown[0]["tensor"].text == "model/layers.*.block.bias_* 1,000 tensors"


def test_twenty_thousand_names_without_a_pattern_are_grouped_by_component() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a}{b}{c}" for a in letters for b in letters for c in letters][:17_000]
    arrays = {f"model/{name}": whole("float32", (number + 1,)) for number, name in enumerate(names)}
    text = text_of(manifest(arrays))
    found = parsed(text)
    assert len(text) < 1_000_000
    *largest, rest = found.rows("tensors")
    assert len(largest) == 500 and largest[0]["size"].attributes["data-value"] == "68000"
    assert rest["tensor"].text == "model/… 16,500 tensors"
    assert rest["size"].attributes["data-value"] == str(sum(4 * n for n in range(1, 16_501)))
    (treemap,) = found.all("div", "treemap")
    assert sum(areas(treemap).values()) == pytest.approx(1, rel=1e-2)


def test_a_checkpoint_without_tensors_and_one_of_empty_tensors_are_pages() -> None:
    for arrays in ({}, {"model/empty": whole("float32", (0, 5))}):
        found = page_of(manifest(arrays))
        assert not found.all("div", "treemap") and not found.all("article")
        assert len(found.rows("tensors")) == len(arrays)


def test_tensors_of_checkpoints_inside_of_it_are_told_apart_by_their_folders() -> None:
    folders = {"": "sharded", "common": "state", "objects": "state"}
    made = {folder: manifest({f"{key}/w": whole("float32", (5,))}) for folder, key in folders.items()}
    found = parsed(page("inspect.html", "checkpoint", checkpoint=checkpoint_values(made, DiskUse(1, 1))))
    assert [row["tensor"] for row in found.texts("tensors")] == ["common/state/w", "objects/state/w", "sharded/w"]
    assert [row["component"] for row in found.texts("components")] == ["sharded", "common/state", "objects/state"]
