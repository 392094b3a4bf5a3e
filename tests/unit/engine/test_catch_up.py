"""What a rollout takes before its first update: the same bits and the same version as the others got, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ckpt.engine import BroadcastCheckpointEngine, CheckpointEngineRegistry
from ckpt.engine.elastic.catch_up import load_from_checkpoint, load_from_peers
from ckpt.engine.elastic.membership import News
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import digest_of_bucket
from ckpt.errors import CorruptCheckpointError, MissingStateError
from ckpt.state.statefuls import ModelState
from tests.support.engines import BUCKET_BYTES, TIED, MixedModel, Published, live_model, require_same

STEP = 5


@pytest.fixture(scope="module")
def published() -> Any:
    """An engine that has published the weights of a step, and what its lead says of it."""
    engine = CheckpointEngineRegistry.new("naive", BUCKET_BYTES, is_master=True, timeout_s=20.0)
    assert isinstance(engine, VersionedEngine)
    with engine:
        engine.init_process_group(0, 1, 1, engine.prepare())
        asyncio.run(engine.send_weights(Published(MixedModel(STEP)), STEP))
        asyncio.run(engine.receive_into(live_model(), STEP))
        assert engine.version is not None and engine.layout is not None
        yield engine, News(*engine.version, engine.layout.digest(), dict(engine.bucket_digests)), engine.layout


def state(step: int) -> dict[str, torch.Tensor]:
    return ModelState(MixedModel(step)).state_dict()


def test_a_checkpoint_gives_the_version_that_was_published_to_the_bit(published: Any) -> None:
    engine, news, layout = published
    live = live_model()
    assert (
        load_from_checkpoint(live, news, layout, digest_of_bucket, STEP, state(STEP)) == engine.version == live.version
    )
    require_same(live.state_dict(), state(STEP))


def test_of_another_step_it_gives_that_one(published: Any) -> None:
    _, news, layout = published
    live = live_model()
    version = load_from_checkpoint(live, news, layout, digest_of_bucket, STEP - 1, state(STEP - 1))
    assert (version.step, version.digest != news.digest, live.version) == (STEP - 1, True, version)
    require_same(live.state_dict(), state(STEP - 1))


def test_weights_come_in_the_types_in_which_they_travel() -> None:
    half = BroadcastCheckpointEngine(BUCKET_BYTES, rollout_dtype="bfloat16")
    weights = {"a": torch.randn(301, 7), "b": torch.arange(5)}
    layout = WeightLayout(BUCKET_BYTES, [0])
    for name, one in weights.items():
        layout.add(name, half.travels_as(name, one.dtype), one.shape)
    module = torch.nn.Module()
    module.register_buffer("a", torch.zeros(301, 7, dtype=torch.bfloat16))
    module.register_buffer("b", torch.zeros(5, dtype=torch.int64))
    live = live_model(module=module)
    load_from_checkpoint(live, News(9, "", "", {}), layout, digest_of_bucket, 3, weights)
    require_same(live.state_dict(), {"a": weights["a"].to(torch.bfloat16), "b": weights["b"]})


def test_a_checkpoint_that_is_not_what_was_published_is_refused(published: Any) -> None:
    _, news, layout = published
    changed = state(STEP)
    changed["table"][3, 3] += 1
    live = live_model()
    with pytest.raises(CorruptCheckpointError, match=f"the checkpoint of step {STEP} has weights with digest"):
        load_from_checkpoint(live, news, layout, digest_of_bucket, STEP, changed)
    assert live.version is None


@pytest.mark.parametrize("name", ["embed.weight", "bytes"])
def test_a_checkpoint_that_lacks_a_weight_or_has_another_shape_is_refused(name: str, published: Any) -> None:
    _, news, layout = published
    for weights in (state(STEP) | {name: torch.zeros(3)}, {k: v for k, v in state(STEP).items() if k != name}):
        live = live_model()
        with pytest.raises(MissingStateError, match=f"{name} is published as"):
            load_from_checkpoint(live, news, layout, digest_of_bucket, STEP, weights)
        assert live.version is None
    assert TIED


def test_the_trainers_memory_gives_the_same_and_is_refused_where_it_has_moved_on(published: Any) -> None:
    engine, news, layout = published
    there = engine.receive_buffers[0]

    def read(buckets: Mapping[int, torch.Tensor]) -> None:
        for number, host in buckets.items():
            host.copy_(there.bucket(number))

    live = live_model()
    assert load_from_peers(live, news, layout, digest_of_bucket, read) == engine.version == live.version
    require_same(live.state_dict(), state(STEP))

    def read_late(buckets: Mapping[int, torch.Tensor]) -> None:
        read(buckets)
        buckets[2][77] ^= 4

    other = live_model()
    with pytest.raises(CorruptCheckpointError, match=f"1 of {layout.num_buckets} buckets .* not those of step {STEP}"):
        load_from_peers(other, news, layout, digest_of_bucket, read_late)
    assert other.version is None
