"""`recipes.diff` beside retention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.cli import comparing
from ckpt.cli.comparing import DiffKeys, diff
from ckpt.errors import CheckpointGoneError
from ckpt.ranks.topology import Topology
from tests.support.states import Held, coordinator


@pytest.mark.parametrize("removed", [0, 1])
def test_a_checkpoint_that_is_removed_while_it_is_compared_is_gone_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    model = StateComponent("model", Held({"w": torch.arange(20_000)}), "global")
    with coordinator(Topology.alone(), tmp_path, [model]) as run:
        paths = [Path(run.save_checkpoint(checkpoint_id=id)) for id in "12"]
    compare = comparing.compare

    def removed_meanwhile(*args: Any) -> Iterator[Any]:
        paths[removed].rename(tmp_path / "removed")
        return compare(*args)

    monkeypatch.setattr(comparing, "compare", removed_meanwhile)
    with pytest.raises(CheckpointGoneError, match=f"{paths[removed]} was removed or replaced while it was read"):
        diff(DiffKeys(str(paths[0]), str(paths[1])))
