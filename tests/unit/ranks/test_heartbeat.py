"""What a rank publishes of its place: at once, but for thousands of ranks no faster than their store takes it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ckpt.ranks import heartbeat
from ckpt.ranks.agreement import Beat, PhaseIndex
from ckpt.ranks.heartbeat import Heartbeat, beat_key
from ckpt.ranks.store_client import StoreClient


def _published(client: StoreClient) -> Beat:
    data = client.peek(beat_key(3))
    assert data is not None
    return Beat.decode(data)


@pytest.mark.parametrize(("num_ranks", "is_late"), [(1000, False), (10_240, True)])
def test_one_of_thousands_publishes_phases_that_follow_each_other_with_its_next_beat(
    num_ranks: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s)
    client = StoreClient(dist.HashStore(), writer=3)
    beat = Heartbeat(client, 3, host="here", interval_s=60.0, num_ranks=num_ranks)
    beat.enter(PhaseIndex(1, 0), "save of 1", "collect")
    assert _published(client).phase == "collect"
    now_s += 0.4
    beat.enter(PhaseIndex(1, 1), "save of 1", "write")
    assert _published(client).phase == ("collect" if is_late else "write")
    assert beat.at == PhaseIndex(1, 1)
    now_s += 0.2
    beat.enter(PhaseIndex(1, 2), "save of 1", "commit")
    assert _published(client).phase == "commit", "0.6 s after the last one, as 10,240 ranks can each half second"
    beat.enter(PhaseIndex(1, 3), "save of 1", "publish")
    beat.say()
    said = _published(client)
    assert (said.phase, said.moves) == ("publish", 4), "each entry is progress"
