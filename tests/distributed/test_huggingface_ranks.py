"""Trainer with checkpoints of this package, on several ranks that are killed or told to end."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ckpt.cli.converting import ConvertKeys, convert_on_ranks, run_of
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_accumulation_steps": 2},
    "fsdp": FSDP,
    "adapter ddp": {"is_adapted": True},
    "adapter fsdp": {"is_adapted": True, **FSDP},
}


def _train(
    topology: Topology,
    folder: Path,
    arguments: dict[str, Any],
    at: int = 0,
    do: Callable[[Topology], None] | None = None,
    mode: str = "async",
) -> tuple[dict[int, float], str, Any]:
    """Train from the newest checkpoint on. The losses; a digest of weights and moments; and what ended the program."""
    from tests.support.trainers import Seen, Stopped, trainer  # in the rank: it takes a second

    world_size = str(topology.world_size)
    os.environ.update({"RANK": str(topology.rank), "LOCAL_RANK": str(topology.rank)})
    os.environ.update({"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size})
    seen = Seen(at, partial(do, topology) if do is not None else lambda: None)
    given = dict(arguments)  # of which Trainer changes some
    one = trainer(folder, seen, ckpt={"mode": mode, "load": "two-stage"}, **given)
    assert one.args.world_size == topology.world_size
    ended: Any = None
    try:
        one.train(resume_from_checkpoint="latest")
    except SystemExit as error:
        ended = error.code
    except Stopped:
        pass
    except ConfigurationError:
        raise
    except (RuntimeError, CheckpointError) as error:  # of a collective, or of a save, with a rank that is gone
        return seen.losses, "", str(error)
    state = [moment for of_one in one.optimizer.state.values() for moment in (of_one["exp_avg"], of_one["exp_avg_sq"])]
    digest = hashlib.sha256()
    for tensor in [*one.model.state_dict().values(), *state]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.losses, digest.hexdigest(), ended


def ranks(num: int, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(num, _train, *args, process_group=True, is_only=True, timeout_s=120.0, **options)


def _die_in_the_next_save(topology: Topology) -> None:
    if topology.is_lead:
        ManifestWriter.write = lambda *_args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_are_killed_in_a_save_go_on_to_the_bit(tmp_path: Path, layout: str) -> None:
    arguments = LAYOUTS[layout]
    straight = ranks(2, tmp_path / "straight", arguments)
    killed = run_ranks(2, _killed, tmp_path / "killed", arguments, process_group=True, expect_dead=[0], timeout_s=120.0)
    assert "rank 0" in killed[1]
    root = tmp_path / "killed/ckpt"
    assert [path.name for path in root.glob("checkpoint-*")] == ["checkpoint-00000004"]
    resumed = ranks(2, tmp_path / "killed", arguments)
    for (losses, digest, _), (again, digest_again, _) in zip(straight, resumed, strict=True):
        assert again == {step: loss for step, loss in losses.items() if step > 4}
        assert digest_again == digest
    patterns = {key: one.sharing_pattern for key, one in read_manifest(root / "checkpoint-00000012").components.items()}
    parts = "sharded" if "fsdp" in layout else "replicated"
    assert patterns == {
        **({"adapter-default": parts, "base": "replicated"} if "adapter" in layout else {"model": parts}),
        "optimizer": parts,
        "scheduler": "replicated",
        "trainer": "sharded",
        "rng": "per_rank",
    }


def _killed(topology: Topology, folder: Path, arguments: dict[str, Any]) -> Any:
    return _train(topology, folder, arguments, 6, _die_in_the_next_save, "sync")[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_number_of_ranks_goes_on(tmp_path: Path, layout: str) -> None:
    arguments = LAYOUTS[layout] | {"save_steps": 12}
    saved = ranks(2, tmp_path, arguments)
    loaded = ranks(3, tmp_path, arguments | {"max_steps": 14}, 12, _stop)
    assert [one[:2] for one in loaded] == [({}, saved[0][1])] * 3
    trained = ranks(3, tmp_path, arguments | {"max_steps": 14})
    assert sorted(trained[0][0]) == [13, 14]
    keys = ConvertKeys(str(tmp_path / "ckpt/checkpoint-00000012"), str(tmp_path / "hf"), "safetensors", check="logits")
    if "adapter" in layout:  # alone, for its base is frozen
        convert_on_ranks(run_of(replace(keys, component="adapter-default", check=None)), Topology.alone())
        assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        return
    held = convert_on_ranks(run_of(keys), Topology.alone())["held"]  # of the two ranks: config and all
    assert held["copied"] == ["config.json", "generation_config.json"]
    assert held["left_out"][0] == "lm_head.weight (tied: it is transformer.wte.weight)"


def _stop(topology: Topology) -> None:
    from tests.support.trainers import stop

    stop()


def _tell_rank_1(topology: Topology) -> None:
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_to_one_rank_ends_all_after_one_step(tmp_path: Path) -> None:
    told = ranks(2, tmp_path, {"max_steps": 500, "save_steps": 500}, 6, _tell_rank_1)
    assert [one[2] for one in told] == [TOLD_TO_END] * 2
    last = max(told[0][0])
    assert 6 < last < 500
    assert [path.name for path in (tmp_path / "ckpt").glob("checkpoint-*")] == [f"checkpoint-{last:08d}"]


def _at_odds(topology: Topology, folder: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        _train(topology, folder / str(topology.rank), {})
    return str(refused.value)


def test_ranks_that_would_resume_from_different_checkpoints_are_refused(tmp_path: Path) -> None:
    refusals = run_ranks(2, _at_odds, tmp_path, process_group=True, is_only=True)
    assert len(set(refusals)) == 1
    assert "ranks would resume from different checkpoints" in refusals[0]
    assert f"output_dir is {tmp_path}/1 on rank 1, and {tmp_path}/0 on rank 0" in refusals[0]
