"""What commands print fits a terminal of 80 columns, but for names that are longer: no name is broken, and nothing is cut off."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from rich.console import Console

from ckpt import StateComponent
from ckpt.cli.comparing import listed
from ckpt.cli.pages.sweep_page import short_names
from ckpt.cli.reading import InspectKeys, show
from ckpt.cli.tables import show as show_parts
from ckpt.interop.comparing import Difference
from ckpt.ranks.topology import Topology
from recipes.benchmark.tables import print_table
from recipes.commands.patterns import show as show_doctor
from recipes.support.sweep import sweep_table
from tests.support.states import Held, coordinator, global_index

KEYS = {
    "ckpt": ("zarr", "tensorstore"),
    "strategy": ("direct", "two-stage"),
    "launch.nproc_per_node": ("1", "16"),
    "save.mode": ("sync", "async"),
    "coordinator.memory_budget_mib": ("null", "4096"),
    "components.optimizer.validation_level": ("quick", "full"),
    "components.model.validation_level": ("quick", "full"),
    "parallel": ("ddp", "tp_fsdp"),
    "data.path": ("/scratch/users/someone/corpora/wikipedia.txt", "/scratch/users/someone/corpora/books.txt"),
}
SENTENCE = (
    "train.batch_size=12 does not divide into the 5 parts that parallel=ddp makes of a batch: give a multiple of 5"
)


def rows(num_keys: int) -> list[dict[str, Any]]:
    """Jobs over some keys, one of which failed."""
    made: list[dict[str, Any]] = []
    for job in range(4):
        overrides = ["output_dir=/scratch/sweeps/the-third", "train.steps=20"]
        overrides += [
            f"{key}={values[(job >> at % 2) & 1]}" for at, (key, values) in enumerate([*KEYS.items()][:num_keys])
        ]
        figures = {
            "save_s": 0.171 * 30**job, "load_s": None if job == 3 else 12.5, "blocked_s": 4321.0,
            "bytes_written": 12_892_761 * 10**job, "bytes_read": 999_900_000_000,
            "state_digest": xxhash.xxh3_128_hexdigest(bytes([job])), "run_dir": f"/scratch/sweeps/the-third/{job}",
        }  # fmt: skip
        made.append(
            {"overrides": overrides, "error": SENTENCE}
            if job == 2
            else {"overrides": overrides, "error": None, **figures}
        )
    return made


def printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def fits(text: str) -> bool:
    return "\N{HORIZONTAL ELLIPSIS}" not in text and max(map(len, text.splitlines())) <= 80


def is_whole(text: str) -> bool:
    """Whether lines are longer than 80 columns for one long word alone."""
    return all(len(line) <= 80 or len(line.split()) == 1 for line in text.splitlines())


def column(text: str, heading: str) -> str:
    """All of a first column, without what folding adds."""
    lines = text.splitlines()
    rule = next(
        at
        for at, line in enumerate(lines)
        if line.startswith("\N{BOX DRAWINGS LIGHT HORIZONTAL}") and lines[at - 1].startswith(heading)
    )
    width = re.match(rf"{heading} +", lines[rule - 1])
    assert width is not None
    below = [line[: width.end()] for line in lines[rule + 1 :]]
    return joined("".join(below[: below.index("")] if "" in below else below))


def joined(text: str) -> str:
    """Without what folding adds."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("num_keys", [1, 4, 9])
def test_the_table_of_a_sweep_has_every_figure_and_override_in_80_columns(num_keys: int) -> None:
    swept = rows(num_keys)
    text = printed(sweep_table(swept))
    assert fits(text), text
    whole = joined(text)
    for number, row in enumerate(swept):
        own = [one for one in row["overrides"][2:] if not all(one in other["overrides"] for other in swept)]
        for key, _, value in (override.partition("=") for override in own):
            name = short_names([*KEYS][:num_keys])[key]
            assert key in whole and f"{name}={value}" in whole, (key, value)
        if row["error"]:
            assert joined(f"job {number} failed: {SENTENCE}") in whole
        else:
            assert row["state_digest"][:8] in text and row["state_digest"] not in text
    assert "inalljobs:output_dir=/scratch/sweeps/the-thirdtrain.steps=20" in whole
    for figure in ("0.171", "5.130", "4617.0", "4321.0", "12.500", "12.9 MB", "12.9 GB", "999.9 GB"):
        assert figure in text, figure


def test_digests_that_begin_alike_are_shown_as_long_as_they_need_to_be() -> None:
    one, two = rows(1)[:2]
    one["state_digest"], two["state_digest"] = "0123456789" + "a" * 22, "0123456789" + "b" * 22
    text = printed(sweep_table([one, two]))
    assert "0123456789a " in text and "0123456789b " in text


def test_keys_are_named_by_as_many_parts_as_tell_them_apart() -> None:
    assert short_names(["a.x", "b.x", "c.y", "y", "+z.w"]) == {
        "a.x": "a.x",
        "b.x": "b.x",
        "c.y": "c.y",
        "y": "y",
        "+z.w": "w",
    }


@pytest.fixture
def in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("in_80_columns")
def test_inspect_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 444 tensors with its usual names, and a checkpoint that is named by the time."""
    root = tmp_path / "outputs" / "a-run-with-quite-a-long-name-of-its-own" / "checkpoints"
    layers = ("attn.c_attn.weight", "attn.c_proj.bias", "mlp.c_fc.weight")
    state = {f"transformer.h.{n}.{layer}": torch.zeros(2, 3) for n in range(147) for layer in layers}
    state |= {
        "transformer.wte.weight": torch.zeros(1, 1),
        "lm_head.weight": global_index((640, 900)),
        "x" * 120: torch.zeros(1),
    }
    parts = [StateComponent("model", Held(state), "replicated")]
    parts += [
        StateComponent(key, Held({"at": 1}), "global")
        for key in ("optimizer", "scheduler", "rng", "dataloader", "progress")
    ]
    made = coordinator(Topology.alone(), root, parts)
    for checkpoint_id in (5, "20261122T101503.123456"):
        made.save_checkpoint(checkpoint_id=checkpoint_id)
    show(InspectKeys(str(root)))
    text = capsys.readouterr().out
    assert is_whole(text), text
    assert "\ncheckpoint-00000005\n" in text and "\ncheckpoint-20261122T101503.123456 the newest\n" in text
    assert "components:model,optimizer,scheduler,rng,dataloader,progress" in joined(text)
    sizes = r"  ranks: 1  arrays: 444  size: 2\.3 MB\s+files: 2\.\d MB  unique: 2\.\d MB\n"
    assert len(re.findall(sizes, text)) == 2, text
    show(InspectKeys(str(root / "checkpoint-00000005"), limit=None))
    text = capsys.readouterr().out
    assert is_whole(text), max(text.splitlines(), key=len)
    words = set(text.split())
    assert all(f"model/{key}" in words for key in state)
    assert re.search(r"model/lm_head\.weight +float32 +640 x 900 +2\.3 MB +zarr by rank 0", text)
    show(InspectKeys(str(root / "checkpoint-00000005")))
    text = capsys.readouterr().out
    assert is_whole(text), text
    assert len(re.findall(r"\nmodel/", text)) == 20
    assert text.endswith("\n424 more arrays: give filter=<part of their name> or all=True to see them\n")


@pytest.mark.usefixtures("in_80_columns")
def test_a_filter_that_chooses_nothing_says_what_names_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {f"h.{n}.attn.c_attn.weight": torch.zeros(2) for n in range(1200)}
    made = coordinator(Topology.alone(), tmp_path, [StateComponent("model", Held(state), "replicated")])
    made.save_checkpoint(checkpoint_id="1")
    for wanted, said in {
        "attention": "filter=attention chooses none of 1,200 arrays; parts of their names: model, h, attn, c_attn, weight",
        "[a]": "filter=[a] chooses none of 1,200 arrays; ",
        "ATTN": "filter=ATTN",
        "*.7.*": "filter=*.7.* leaves out 1,199 of 1,200 arrays",
    }.items():
        show(InspectKeys(str(tmp_path / "checkpoint-1"), filter=wanted))
        text = capsys.readouterr().out
        assert (joined(said) in joined(text)) == (wanted != "ATTN"), text
        assert text.count("model/h.") == {"ATTN": 20, "*.7.*": 1}.get(wanted, 0)


@pytest.mark.parametrize("width", [40, 80, None])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_listing_breaks_no_name_on_a_terminal_and_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None, is_long: bool
) -> None:
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    names = [f"state.transformer.h.{n}.attn.c_attn.weight.exp_avg" * (6 if is_long else 1) for n in range(60)]
    found = [Difference("model" if n % 3 else "optimizer", name, "bits", 1.0, 2.0, n, 0.5) for n, name in enumerate(names)]
    show_parts("60 differences in " + " ".join(names[:5]), *listed(found, all=False))
    text = capsys.readouterr().out
    assert joined(text).endswith("40moredifferences:giveall=Truetoseethem")
    rows = re.findall(r"^(model|optimizer)\s+(\S+)\s", text, re.MULTILINE)
    assert [key for key, _ in rows].count("model") == len(rows) // 2 == 10, "each component has its share"
    assert all(name in names for _, name in rows)
    if width is not None:
        assert all(len(line) <= width or len(line.split()) <= 2 for line in text.splitlines()), text
    show_parts(*listed(found, all=True))
    text = capsys.readouterr().out
    assert all(name in text for name in names) and "more" not in text


@pytest.mark.usefixtures("in_80_columns")
def test_components_of_checkpoints_that_differ_and_damage_are_told_beside_or_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint_id, keys in (("1", ["model"]), ("2", ["model", "ema"]), ("3", ["model"])):
        parts = [StateComponent(key, Held({"w": torch.zeros(3)}), "global") for key in keys]
        coordinator(Topology.alone(), tmp_path, parts).save_checkpoint(checkpoint_id=checkpoint_id)
    manifest = tmp_path / "checkpoint-3" / "checkpoint_manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    show(InspectKeys(str(tmp_path)))
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert is_whole(text)
    assert column(text, "checkpoint") == "checkpoint-1modelcheckpoint-2model,emacheckpoint-3thenewest"
    assert any(line.startswith("checkpoint-3 ") and " damaged " in line for line in lines)
    assert "doesnotmatchitsowndigest" in joined(text.partition("\ncheckpoint-3:")[2])


@pytest.mark.usefixtures("in_80_columns")
def test_the_doctor_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "optimizer is declared PER_RANK, but ranks 0 and 1 hold equal bits: declare it so"
    one = {
        "component": "optimizer",
        "declared": "PER_RANK",
        "found": ["PER_GROUP data_parallel"],
        "verdict": "loses state",
        "sentence": sentence,
    }
    assert show_doctor({"parallel": "tp_fsdp", "world_size": 16, "steps": 2, "components": [one]}, as_json=False) == 1
    text = capsys.readouterr().out
    assert fits(text) and joined(sentence) in joined(text)
    assert "optimizer  PER_RANK  PER_GROUP data_parallel  loses state" in text


def test_a_benchmark_s_table_that_is_too_wide_is_printed_in_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headings = ["save s", "load s, cold", "load s, warm", "save peak MiB", "load peak MiB", "read / needed"]
    names = ("ckpt zarr, incremental", "torch.distributed.checkpoint")
    rows = {name: {heading: f"{at}.25 (0.20..12.34)" for at, heading in enumerate(headings)} for name in names}
    for columns, num_parts in (("80", 3), ("200", 1)):
        monkeypatch.setenv("COLUMNS", columns)
        print_table("workload", rows)
        text = capsys.readouterr().out
        assert fits(text) or num_parts == 1
        assert [text.count(name) for name in names] == [num_parts] * 2 and text.count("workload") == 1
        assert all(heading in text for heading in headings)
        assert all(text.count(f" {at}.25 (0.20..12.34)") == 2 for at in range(6))


def test_a_turned_table_has_a_column_for_each_contender(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("plans", {"2 ranks": {"chunks": "5", "plan, s": "0.1"}, "4 ranks": {"chunks": "9"}}, turned=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "ranks", "4", "ranks"] in lines and ["chunks", "5", "9"] in lines and ["plan,", "s", "0.1"] in lines
