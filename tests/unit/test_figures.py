"""The tables of docs/figures.md are those of the results beside it, and no figure of ours is typed there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ckpt
from tests.support.doc_scripts import doc_script

DOCS = Path(ckpt.__file__).parents[1] / "docs"
MACHINE = {
    "processor": "A Processor", "cores": 2, "accelerator": None, "file_system": "ext4", "torch": "2.13", "date": "2026-11-25",
}  # fmt: skip


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return doc_script("write_figures")


def test_the_page_has_the_tables_of_the_committed_results(writer: ModuleType) -> None:
    text = (DOCS / "figures.md").read_text()
    results = writer.committed_results()
    assert writer.page(text, results) == text, "run python docs/write_figures.py"
    assert sorted(results) == sorted(name for _, name, _ in writer._PLACE.findall(text))


def _result(**medians: dict[str, float]) -> dict[str, Any]:
    return {
        "state_bytes": 1_960_000_000, "tensors": 596, "layout": "ddp", "ranks": 4, "machine": MACHINE,
        "rounds": {name: [row, row, row] for name, row in medians.items()},
        "medians": medians,
        "ranges": {name: {figure: [value * 0.9, value * 1.1] for figure, value in row.items()} for name, row in medians.items()},
    }  # fmt: skip


def test_a_table_says_what_was_measured_and_on_what_and_marks_ours(writer: ModuleType) -> None:
    zarr = {"save_s": 1.0, "load_cold_s": 2.0, "save_peak_mib": 31.6, "load_peak_mib": 0.2, "bytes_read": 8.0, "bytes_needed": 4.0}
    lines = writer.table_of(_result(raw={"save_s": 0.5}, **{"zarr/two-stage": zarr})).splitlines()
    assert lines == [
        "596 tensors of 1.96 GB, ddp, 4 ranks; medians of 3 rounds, 2 cores of A Processor, ext4, torch 2.13, 2026-11-25:",
        "",
        "|  | save s | load s, cold | save / load peak MiB | read / needed |",
        "| --- | --- | --- | --- | --- |",
        "| raw | 0.50 (0.45..0.55) |  |  |  |",
        "| **zarr/two-stage** | 1.00 (0.90..1.10) | 2.00 (1.80..2.20) | 32 / 0 | 2.00 |",
    ]


def test_saves_beside_training_and_updates_have_columns_of_their_own(writer: ModuleType) -> None:
    background = {"first_stall_s": 0.3, "stall_s": 0.2, "slow_down": 1.1, "durable_s": 2.0, "peak_mib": 9.0}
    table = writer.table_of(_result(none={"stall_s": 0.0}, thread=background)).splitlines()
    assert table[2] == "|  | first stall, s | later stall, s | steps, times | durable after s | peak MiB |"
    update = _result(kimi={"transfer_s": 0.4, "update_s": 0.5}) | {"trainers": 2, "rollouts": 1, "bytes": 5e8}
    del update["ranks"]
    assert writer.table_of(update).splitlines()[2] == "|  | transfer s | whole update s |"
    assert "2 trainers to 1 rollout" in writer.table_of(update)


def test_a_name_that_two_benchmarks_have_is_ours_in_one_of_them(writer: ModuleType) -> None:
    update = {"transfer_s": 0.4}
    updates = _result(broadcast=update, raw=update, **{"per-tensor": update}) | {"trainers": 1, "rollouts": 1}
    del updates["ranks"]
    assert [row.split(" | ")[0] for row in writer.table_of(updates).splitlines()[4:]] == ["| **broadcast**", "| raw", "| per-tensor"]
    loads = writer.table_of(_result(broadcast={"load_warm_s": 0.4}))
    assert loads.splitlines()[4].startswith("| broadcast |")


def test_a_load_by_fewer_ranks_or_through_a_slow_store_is_named(writer: ModuleType) -> None:
    result = _result(zarr={"load_warm_s": 1.0})
    assert _caption_of(writer, result | {"load_ranks": 4, "store_mib_s": None}) == _caption_of(writer, result)
    assert ", ddp, 4 ranks, loaded on 2; medians" in _caption_of(writer, result | {"load_ranks": 2})
    assert ", ddp, 4 ranks, read at 400 MiB/s; medians" in _caption_of(writer, result | {"store_mib_s": 400.0})


def test_seconds_of_megatron_core_over_ours_stand_in_the_row_of_ours(writer: ModuleType) -> None:
    costs = {"save_s": 1.0, "load_cold_s": 2.0, "load_warm_s": 1.0, "save_peak_mib": 1811.0, "load_peak_mib": 0.2}
    ratios = {"save_s": 4.9, "load_cold_s": 0.8, "load_warm_s": 2.0, "save_peak_mib": None, "load_peak_mib": 3.0}
    result = _result(**{"zarr/two-stage": costs, "megatron/two-stage": costs}) | {"ratios": {"zarr/two-stage": ratios}}
    lines = writer.table_of(result | {"layout": "TP 2 x DP 2, moments in flattened ranges"}).splitlines()
    measured = "1.00 (0.90..1.10) | 2.00 (1.80..2.20) | 1.00 (0.90..1.10) | 1,811 / 0"
    assert lines[0].startswith("596 tensors of 1.96 GB, TP 2 x DP 2, moments in flattened ranges, 4 ranks; medians")
    assert lines[2].endswith(" | load s, warm | save / load peak MiB | megatron / ours: save, cold, warm |")
    assert lines[4:] == [
        f"| **zarr/two-stage** | {measured} | 4.90 / 0.80 / 2.00 |",
        f"| megatron/two-stage | {measured} |  |",
    ]


def test_conversions_have_their_speed_relative_to_a_copy(writer: ModuleType) -> None:
    rows = {"cp -r": {"convert_s": 2.0, "peak_mib": 1.0}, "dcp, 4 ranks": {"convert_s": 1.0, "peak_mib": 20.0}}
    ratios = {"cp -r": {"convert_s": 1.0}, "dcp, 4 ranks": {"convert_s": 2.0}}
    assert writer.table_of(_result(**rows) | {"ratios": ratios}).splitlines()[2:] == [
        "|  | s | speed, relative to cp | peak MiB |",
        "| --- | --- | --- | --- |",
        "| cp -r | 2.00 (1.80..2.20) | 1.00 | 1 |",
        "| **dcp, 4 ranks** | 1.00 (0.90..1.10) | 2.00 | 20 |",
    ]


def test_costs_of_validation_have_milliseconds(writer: ModuleType) -> None:
    cost = {"total_s": 0.05, "more_s": 0.04, "per_gb_s": 0.02}
    assert writer.table_of(_result(quick=cost, **{"bare hash": cost})).splitlines()[2:] == [
        "|  | s | s more than none | s per GB |",
        "| --- | --- | --- | --- |",
        "| **quick** | 0.050 (0.045..0.055) | 0.040 (0.036..0.044) | 0.020 (0.018..0.022) |",
        "| bare hash | 0.050 (0.045..0.055) | 0.040 (0.036..0.044) | 0.020 (0.018..0.022) |",
    ]


def test_plans_have_a_row_for_each_number_of_ranks(writer: ModuleType) -> None:
    case = {"chunks": 371984, "plan_s": 0.1, "total_s": 0.2, "cached_s": 0.004, "peak_mib": 8.4, "max_to_mean": 1.007, "min_to_mean": 0.999}
    plans = _result(**{"1,024 ranks, sharded": case}) | {"layout": "1,007.495 billion parameters, TP 8 x PP 16"}
    del plans["ranks"]
    lines = writer.table_of(plans).splitlines()
    assert lines[0].startswith("596 tensors of 1.96 GB, 1,007.495 billion parameters, TP 8 x PP 16; medians of 3 rounds")
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        "1,024 ranks, sharded", "371,984", "0.200 (0.180..0.220)", "0.004 (0.004..0.004)", "8", "1.007 / 0.999",
    ]  # fmt: skip


def _caption_of(writer: ModuleType, result: dict[str, Any]) -> str:
    return str(writer.table_of(result).splitlines()[0])


def test_a_table_without_its_result_is_an_error(writer: ModuleType) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        writer.page("<!-- figures: nowhere -->\n<!-- end of figures -->", {})
