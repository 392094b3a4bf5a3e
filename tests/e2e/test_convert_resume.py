"""A run that goes on from its checkpoint after a conversion there and back, or from the export itself, is to the bit the run before."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.cli.comparing import DiffKeys, diff
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.ranks.topology import Topology
from tests.e2e.runs import checkpoint, run
from tests.support.covering import and_in_full

LAYOUTS = {
    "single": (1, ["parallel=single", "model.tie_embeddings=true"]),
    "ddp 2": (2, ["data.dispatch=true"]),
    "fsdp 2": (2, ["parallel=fsdp"]),
    "pipeline 2": (2, ["parallel=pipeline", "model.tie_embeddings=true"]),
    "hsdp 4": (4, ["parallel=hsdp"]),
    "tp_fsdp 4": (4, ["parallel=tp_fsdp"]),
    "ddp_pipeline 4": (4, ["parallel=ddp_pipeline"]),
    "accelerate 2": (2, ["parallel=accelerate"]),
}
def convert(src: Path, dst: Path, to: str) -> None:
    keys = ConvertKeys(str(src), str(dst), to, load=LoadKeys(allow_pickle=True))
    convert_on_ranks(run_of(keys), Topology.alone())


@and_in_full(("layout", "over"), [("single", "torch")], [(layout, over) for layout in LAYOUTS for over in ("dcp", "torch")])
def test_a_run_goes_on_after_a_conversion_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, over: str
) -> None:
    ranks, of_layout = LAYOUTS[layout]
    straight = run(tmp_path / "straight", "train.steps=4", "save.every=2", *of_layout, ranks=ranks)
    path = checkpoint(tmp_path / "straight", 2)
    exported, back = tmp_path / "exported-2", tmp_path / "back" / path.name
    convert(path, exported, over)
    convert(exported, back, "zarr")
    for name, start in (("back", back), ("exported", exported)):
        overrides = ["train.steps=4", "save.every=2", f"resume={start}", "load.allow_pickle=true", *of_layout]
        resumed = run(tmp_path / f"from {name}", *overrides, ranks=ranks)
        assert (resumed["first_step"], resumed["losses"]) == (3, straight["losses"][2:]), name
        assert resumed["state_digest"] == straight["state_digest"], name
        capsys.readouterr()
        last = DiffKeys(*(str(checkpoint(tmp_path / one, 4)) for one in ("straight", f"from {name}")), json=True)
        diff(last)
        said = capsys.readouterr().out
        assert '"component": "model"' not in said and '"component": "rng' not in said, said
