from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict
from ckpt.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from ckpt.dist_checkpointing.validation import (
    StrictHandling,
    adjust_non_strict_load,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    validate_sharding_integrity,
    verify_checkpoint_and_load_strategy,
)
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, MissingStateError, ShardingError
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.storage.metadata import CheckpointingConfig, save_config
from ckpt.storage.stored import read_manifest

STRICT = [
    "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected", "return_all",
    "ignore_all",
]  # fmt: skip


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.arange(3.0))


CHECKPOINT = {
    "kept": tensor("kept").without_data(),
    "rng/shard_0_1": ShardedObject("rng", None, (1,), (0,)),
    "left": tensor("left"),
}


def test_there_are_eight_ways_and_each_is_known_by_its_string() -> None:
    """S1.70"""
    assert [one.value for one in StrictHandling] == STRICT
    for name in STRICT:
        assert parse_strict_flag(name) is parse_strict_flag(StrictHandling(name)) is StrictHandling(name)
    for wrong in ("raise", True, None, 3):
        with pytest.raises(
            CheckpointError, match=f"strict is {wrong!r}; give one of assume_ok_unexpected, log_unexpected,"
        ):
            parse_strict_flag(wrong)  # type: ignore[arg-type]


def test_only_the_first_goes_without_metadata_and_those_of_all_keys_need_all_ranks() -> None:
    """S1.70"""
    asks = (
        StrictHandling.requires_explicit_ckpt_mismatch_check,
        StrictHandling.requires_global_app_metadata,
        StrictHandling.requires_returning_mismatch_keys,
    )
    assert {name: tuple(ask(StrictHandling(name)) for ask in asks) for name in STRICT} == {
        "assume_ok_unexpected": (False, False, False),
        "log_unexpected": (True, False, False),
        "log_all": (True, True, False),
        "raise_unexpected": (True, False, False),
        "raise_all": (True, True, False),
        "return_unexpected": (True, False, True),
        "return_all": (True, True, True),
        "ignore_all": (True, True, False),
    }


@pytest.mark.parametrize("strict", StrictHandling, ids=lambda strict: strict.value)
def test_each_way_does_what_it_says_with_keys_of_one_side(
    strict: StrictHandling, caplog: pytest.LogCaptureFixture
) -> None:
    """S1.70, S1.71: `left` is missing, in the checkpoint alone; `new` is unexpected, requested alone."""
    requested = {"a": tensor("kept"), "b": [tensor("new"), ShardedObject("rng", None, (1,), (0,))]}
    without = {"a": requested["a"], "b": [requested["b"][1]]}
    missing_counts = strict.value.endswith("_all") and strict is not StrictHandling.IGNORE_ALL
    metadata = [requested["a"], *requested["b"]]

    def call() -> Any:
        with caplog.at_level(logging.WARNING):
            return validate_integrity_and_strict_load(requested, strict, False, metadata, [metadata], CHECKPOINT)

    missing = "Missing keys (in the checkpoint, not requested): left; " if missing_counts else ""
    says = f"differ in their keys; {missing}Unexpected keys (requested, not in the checkpoint): new"
    if strict.value.startswith("raise"):
        with pytest.raises(MissingStateError) as refused:
            call()
        assert f"{says}. Request what was saved, or load with strict=log_all" in str(refused.value)
    else:
        left, *misfits = call()
        assert left == (requested if strict is StrictHandling.ASSUME_OK_UNEXPECTED else without)
        quiet = strict in (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.IGNORE_ALL)
        assert misfits == [{"left"} if missing_counts else set(), set() if quiet else {"new"}]
    logged = [record.getMessage() for record in caplog.records]
    assert [says in message for message in logged] == ([True] if strict.value.startswith("log") else [])


def test_what_fits_is_returned_whole_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """S1.70"""
    requested = {"a": tensor("kept"), "b": [tensor("left"), ShardedObject("rng", None, (1,), (0,))]}
    for strict in StrictHandling:
        found = validate_integrity_and_strict_load(
            requested, strict, True, None, [[*requested["b"], requested["a"]]], CHECKPOINT
        )
        assert found == (requested, set(), set())
    assert not caplog.records


def test_the_integrity_of_what_is_requested_is_checked_where_that_is_asked() -> None:
    """S1.72"""
    requested = {"a": tensor("kept")}
    broken = [[requested["a"]], [requested["a"]]]
    with pytest.raises(ShardingError, match="kept: the shard .* has 2 main replicas"):
        validate_integrity_and_strict_load(requested, StrictHandling.ASSUME_OK_UNEXPECTED, True, None, broken)
    with pytest.raises(ShardingError, match="kept: the shard .* has 2 main replicas"):
        validate_sharding_integrity(broken)
    validate_integrity_and_strict_load(requested, StrictHandling.ASSUME_OK_UNEXPECTED, False, None, broken)


@pytest.mark.parametrize(
    ("strict", "integrity", "checkpoint", "says"),
    [
        (
            "assume_ok_unexpected",
            True,
            None,
            "validate_access_integrity needs global_metadata; get it by determine_global",
        ),
        (
            "log_unexpected",
            False,
            None,
            "strict=log_unexpected compares with the checkpoint and needs ckpt_sharded_metadata",
        ),
        ("return_all", False, CHECKPOINT, "strict=return_all needs what all ranks request, global_metadata; get it by"),
    ],
)
def test_metadata_that_are_needed_and_not_given_are_asked_for(
    strict: str, integrity: bool, checkpoint: Any, says: str
) -> None:
    """S1.70: missing keys are not silently none."""
    with pytest.raises(ConfigurationError, match=says):
        validate_integrity_and_strict_load({}, StrictHandling(strict), integrity, [], None, checkpoint)


def test_unexpected_keys_are_taken_out_of_every_depth_and_nothing_else_is() -> None:
    """S1.70"""
    kept, gone = tensor("kept"), tensor("gone")
    state = {"a": gone, "b": {"c": [gone, kept]}, "d": {}, "e": "gone"}
    assert adjust_non_strict_load(state, {"gone"}) == {"b": {"c": [kept]}, "d": {}, "e": "gone"}
    assert state["a"] is gone


def test_reports_name_the_keys_of_both_kinds_and_cut_long_lists(caplog: pytest.LogCaptureFixture) -> None:
    """S1.71"""
    maybe_report_missing_and_unexpected_keys(set(), set())
    with pytest.raises(MissingStateError, match=r"Missing keys .*: a, b; Unexpected keys .*: c\. Request"):
        maybe_report_missing_and_unexpected_keys({"b", "a"}, {"c"})
    with caplog.at_level(logging.WARNING):
        maybe_report_missing_and_unexpected_keys(set(), {f"k{n}" for n in range(9)}, raise_error=False)
    assert (
        "checkpoint): 9 (k0, k1, k2, k3, k4 and 4 more); the load goes on without these" in caplog.records[0].getMessage()
    )


class Common(LoadCommonStrategy):
    def __init__(self, *reads: Any, objects: bool = False) -> None:
        self.reads, self.objects, self.asked = reads, objects, list[Any]()

    @property
    def can_handle_sharded_objects(self) -> bool:
        return self.objects

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self._check(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self._check(loaded_version)

    def _check(self, found: Any) -> None:
        self.asked.append(found)
        if found not in self.reads:
            raise ConfigurationError(f"{type(self).__name__} does not read {found}")

    def load_common(self, checkpoint_dir: Path) -> StateDict:
        raise AssertionError("nothing is loaded here")

    def load_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        raise AssertionError("nothing is loaded here")


class Sharded(LoadShardedStrategy):
    __init__, _check = Common.__init__, Common._check  # type: ignore[assignment]
    check_backend_compatibility = Common.check_backend_compatibility  # type: ignore[assignment]
    check_version_compatibility = Common.check_version_compatibility  # type: ignore[assignment]
    can_handle_sharded_objects = Common.can_handle_sharded_objects

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        raise AssertionError("nothing is loaded here")

    def load_tensors_metadata(self, checkpoint_dir: Path) -> ShardedStateDict:
        raise AssertionError("nothing is loaded here")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Written by formats of this test, for which default strategies are registered."""
    save_config(CheckpointingConfig("sharded of a test", 3, "common of a test", 7), tmp_path)
    return tmp_path


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> tuple[Sharded, Common]:
    import ckpt.dist_checkpointing.strategies.base

    registry = {name: dict(some) for name, some in ckpt.dist_checkpointing.strategies.base.default_strategies.items()}
    monkeypatch.setattr(ckpt.dist_checkpointing.strategies.base, "default_strategies", registry)
    sharded, common = Sharded("sharded of a test", 3), Common("common of a test", 7)
    register_default_strategy(StrategyAction.LOAD_SHARDED, "sharded of a test", 3, sharded)
    register_default_strategy(StrategyAction.LOAD_COMMON, "common of a test", 7, common)
    return sharded, common


def test_a_checkpoint_names_its_own_strategies_and_all_four_checks_are_made(
    checkpoint: Path, defaults: tuple[Sharded, Common]
) -> None:
    """S1.74"""
    assert verify_checkpoint_and_load_strategy(str(checkpoint)) == defaults
    assert [one.asked for one in defaults] == [["sharded of a test", 3], ["common of a test", 7]]


def test_a_format_given_for_the_common_part_chooses_the_common_strategy(
    checkpoint: Path, defaults: tuple[Sharded, Common]
) -> None:
    """S1.74: upstream puts it in the place of the sharded one."""
    given = Sharded("sharded of a test", 3)
    assert verify_checkpoint_and_load_strategy(checkpoint, given, ("common of a test", 7)) == (given, defaults[1])
    assert verify_checkpoint_and_load_strategy(checkpoint, ("sharded of a test", 3)) == defaults
    mine = Common("common of a test", 7)
    assert verify_checkpoint_and_load_strategy(checkpoint, common_strategy=mine) == (defaults[0], mine)


@pytest.mark.parametrize(
    ("sharded", "common", "says"),
    [
        (Sharded(3), Common("common of a test", 7), "Sharded does not read sharded of a test"),
        (Sharded("sharded of a test", 2), Common("common of a test", 7), "Sharded does not read 3"),
        (Sharded("sharded of a test", 3), Common(7), "Common does not read common of a test"),
        (Sharded("sharded of a test", 3), Common("common of a test"), "Common does not read 7"),
        (
            Common(),
            None,
            "sharded_strategy: a Common is no LoadShardedStrategy; give an object of that class, or (backend",
        ),
        (None, SaveShardedStrategy, "common_strategy: the class SaveShardedStrategy is no LoadCommonStrategy"),
        (("nobody's", 1), None, "there is no default strategy for (load_sharded, nobody's, 1)"),
    ],
)
def test_a_strategy_that_does_not_read_the_checkpoint_is_refused(
    checkpoint: Path, defaults: tuple[Sharded, Common], sharded: Any, common: Any, says: str
) -> None:
    """S1.74: each of the four checks counts."""
    with pytest.raises(ConfigurationError) as refused:
        verify_checkpoint_and_load_strategy(checkpoint, sharded, common)
    assert says in str(refused.value)


def test_what_is_no_checkpoint_is_refused_before_any_strategy_is_looked_for(tmp_path: Path) -> None:
    """S1.74"""
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist"):
        verify_checkpoint_and_load_strategy(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="is not a distributed checkpoint: it has no metadata.json"):
        verify_checkpoint_and_load_strategy(tmp_path)


def test_a_torch_dist_folder_is_named_as_what_it_is_with_a_way_on(tmp_path: Path) -> None:
    """S1.74: by every call that is given a folder; a strategy that a program registers for it is used all the same."""
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}'
    )
    says = "is a torch_dist checkpoint of Megatron-Core, .* Load it by ckpt.load.* or by ckpt.dist_checkpointing.load with allow_pickle"
    for given in (("zarr", 1), Sharded("zarr")):
        with pytest.raises(ConfigurationError, match=says):
            verify_checkpoint_and_load_strategy(tmp_path, given, Common("torch"))
    with pytest.raises(CheckpointNotFoundError, match=says):
        read_manifest(tmp_path)
    verify_checkpoint_and_load_strategy(tmp_path, Sharded("torch_dist", 1), Common("torch", 1))
    (tmp_path / "metadata.json").unlink()
    (tmp_path / ".metadata").touch()
    for call in (verify_checkpoint_and_load_strategy, read_manifest):
        with pytest.raises(
            CheckpointNotFoundError, match=r"is a checkpoint of torch\.distributed\.checkpoint, .* Load it by ckpt"
        ):
            call(tmp_path)
    (tmp_path / "metadata.json").write_text("[]")
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint of torch"):
        read_manifest(tmp_path)


def test_one_of_the_two_strategies_must_handle_objects() -> None:
    """S1.6"""
    validate_sharded_objects_handling(Sharded(), Common(objects=True))
    validate_sharded_objects_handling(Sharded(objects=True), Common())
    with pytest.raises(ConfigurationError, match="neither Sharded nor Common handles ShardedObjects"):
        validate_sharded_objects_handling(Sharded(), Common())
