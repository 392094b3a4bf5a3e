"""A checkpoint as Megatron-LM saves fsdp_dtensor, DTensors that two ranks hold unevenly, is read to the bit, in any cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ckpt
from ckpt.format.box import Box
from ckpt.interop.opened import Opened
from ckpt.interop.programs import format_at
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from tests.golden.fsdp_dtensor.contents import param_to_group_meta, plain, tensors
from tests.support.states import same_bits
from tests.support.values import same_values

GOLDEN = Path(__file__).parents[2] / "golden" / "fsdp_dtensor" / "core-0.16.1" / "iter_0000007"


def require_all(found: dict[str, Any]) -> None:
    for path, whole in tensors().items():
        at: Any = found
        for step in path:
            at = at[step]
        assert same_bits(at, whole), path
    assert found["optimizer"]["param_to_group_meta"] == param_to_group_meta()
    rest = {key: value for key, value in found.items() if key not in ("model", "optimizer")}
    expected = plain()
    assert vars(rest.pop("args")) == vars(expected.pop("args"))
    assert same_values(rest, expected)


def test_all_of_it_is_loaded_as_dcp_also_where_a_metadata_json_names_it(tmp_path: Path) -> None:
    assert format_at(GOLDEN) == "dcp"
    require_all(ckpt.load(GOLDEN, allow_pickle=True))
    named = shutil.copytree(GOLDEN, tmp_path / "iter_0000007")
    (named / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    assert format_at(named) == "dcp"
    require_all(ckpt.load(named, allow_pickle=True))


def test_each_of_three_reads_its_rows() -> None:
    source = source_at(GOLDEN, Topology.alone(), DirectLoad(), allow_pickle=True)
    assert source.checkpoint_id == "0000007"
    opened = Opened(source)
    for path, whole in tensors().items():
        one = opened.tensors(path[0], "")[".".join(path[1:])]
        start = 0
        for rows in whole.tensor_split(3):
            assert same_bits(one.read(Box((start, *(0 for _ in rows.shape[1:])), tuple(rows.shape))), rows)
            start += len(rows)
