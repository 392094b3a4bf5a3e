"""The first reference's strategy interfaces: what a subclass must bring, what it is given, and who is the default."""

from __future__ import annotations

import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.dist_checkpointing.strategies import base, common, two_stage, zarr
from ckpt.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    DeclaredFormats,
    LoadCommonStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from ckpt.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from ckpt.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy, timed
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.dtypes import AS_INTEGERS, STORABLE, zarr_name
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest
from ckpt.state.sharded_tensor import ShardedTensor

NOWHERE = Path("nowhere")


class LoadsCommon(DeclaredFormats, LoadCommonStrategy):
    backends, versions = ("json",), (1,)

    def load_common(self, checkpoint_dir: Path) -> dict[str, Any]:
        return {"from": checkpoint_dir}

    def load_sharded_objects(self, sharded_objects_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        return sharded_objects_state_dict


class LoadsSharded(DeclaredFormats, LoadShardedStrategy):
    backends, versions = ("zarr", "tensorstore"), (1, 2)

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        return sharded_state_dict

    def load_tensors_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        weight = ShardedTensor("w", None, torch.float32, (4, 3), (4, 3), (0, 0), (1, 1))
        return {weight.key: weight}


class SavesCommon(SaveCommonStrategy):
    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        raise OSError(28, "No space left on device", str(checkpoint_dir))


class SavesSharded(SaveShardedStrategy):
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        raise OSError(28, "No space left on device", str(checkpoint_dir))


class Folder(AsyncSaveShardedStrategy):
    """Writes each value as a file in the background, and `done` when all ranks have written theirs."""

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        staged = {name: value.clone() for name, value in sharded_state_dict.items()}

        def write() -> None:
            for name, value in staged.items():
                (checkpoint_dir / name).write_bytes(value.numpy().tobytes())

        return AsyncRequest(write, (), [lambda: (checkpoint_dir / "done").touch()], what=f"save of {checkpoint_dir}")


EXAMPLES = {
    StrategyAction.LOAD_COMMON: LoadsCommon(),
    StrategyAction.LOAD_SHARDED: LoadsSharded(),
    StrategyAction.SAVE_COMMON: SavesCommon("json", 1),
    StrategyAction.SAVE_SHARDED: SavesSharded("zarr", 1),
}


# What a subclass must bring


def test_the_actions_have_the_strings_of_the_first_reference() -> None:
    """S1.2: exact strings."""
    assert [action.value for action in StrategyAction] == ["load_common", "load_sharded", "save_common", "save_sharded"]


@pytest.mark.parametrize(
    ("interface", "methods"),
    [
        (LoadStrategyBase, set()),
        (LoadCommonStrategy, {"load_common", "load_sharded_objects"}),
        (LoadShardedStrategy, {"load", "load_tensors_metadata"}),
        (SaveCommonStrategy, {"save_common"}),
        (SaveShardedStrategy, {"save"}),
        (AsyncSaveShardedStrategy, {"async_save"}),
    ],
)
def test_a_strategy_that_lacks_what_its_interface_asks_for_cannot_be_made(interface: Any, methods: set[str]) -> None:
    """S1.5, S1.8, S1.9, S1.11, S1.12, S1.15, S1.17, S1.18: these, and no others, are abstract."""
    checks = {"check_backend_compatibility", "check_version_compatibility"}
    assert interface.__abstractmethods__ == methods | (checks if issubclass(interface, LoadStrategyBase) else set())
    arguments = () if issubclass(interface, LoadStrategyBase) else ("zarr", 1)
    with pytest.raises(TypeError, match="abstract"):
        interface(*arguments)


@pytest.mark.parametrize("strategy", EXAMPLES.values(), ids=lambda strategy: type(strategy).__name__)
def test_nobody_handles_sharded_objects_who_does_not_say_so_and_it_is_a_property(strategy: Any) -> None:
    """S1.6: a property, so that asking is never mistaken for a yes."""
    assert strategy.can_handle_sharded_objects is False
    assert isinstance(type(strategy).can_handle_sharded_objects, property)


def test_a_save_strategy_shows_its_format() -> None:
    """S1.7: backend, version, and a readable str."""
    strategy = SavesSharded("zarr", 7)
    assert isinstance(strategy, SaveStrategyBase)
    assert (strategy.backend, strategy.version, str(strategy)) == ("zarr", 7, "SavesSharded(zarr, 7)")


# What it reads


@pytest.mark.parametrize("backend", ["zarr", "tensorstore"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_strategy_takes_the_formats_that_its_class_declares(backend: str, version: int) -> None:
    """S1.5: what is declared passes."""
    LoadsSharded().check_backend_compatibility(backend)
    LoadsSharded().check_version_compatibility(version)


def test_a_strategy_refuses_every_other_format_and_names_what_it_found_and_what_it_reads() -> None:
    """S1.5: the checks compare."""
    with pytest.raises(ConfigurationError) as caught:
        LoadsSharded().check_backend_compatibility("torch_dist")
    assert str(caught.value) == (
        "LoadsSharded: the checkpoint has backend 'torch_dist', this strategy reads backend 'zarr' or 'tensorstore'; load it "
        "with a strategy that reads backend 'torch_dist'"
    )
    for version in (0, 3, "1", None):
        with pytest.raises(ConfigurationError, match=f"has version {version!r}, this strategy reads version 1 or 2;"):
            LoadsSharded().check_version_compatibility(version)


def upstreams_strategies() -> list[LoadStrategyBase]:
    two_stage = object.__new__(TwoStageDataParallelLoadShardedStrategy)  # made, it would need a process group
    return [ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy(), two_stage, TorchCommonLoadStrategy()]


@pytest.mark.parametrize("strategy", upstreams_strategies(), ids=lambda strategy: type(strategy).__name__)
def test_the_backend_is_also_taken_under_upstream_s_parameter_name(strategy: Any) -> None:
    """S1.5: upstream calls it `loaded_version` in both checks."""
    backend = strategy.backends[0]
    strategy.check_backend_compatibility(loaded_version=backend)
    strategy.check_backend_compatibility(loaded_backend=backend)
    strategy.check_version_compatibility(loaded_version=1)
    with pytest.raises(ConfigurationError, match="has backend 'torch_dist'"):
        strategy.check_backend_compatibility(loaded_version="torch_dist")
    for given in ({}, {"loaded_version": backend, "loaded_backend": backend}):
        with pytest.raises(ConfigurationError, match=f"the name of one backend.*; {len(given)} are given"):
            strategy.check_backend_compatibility(**given)


def test_the_constants_that_programs_import_are_in_upstream_s_modules() -> None:
    """S1.80: and they are in use, not only there."""
    modules = ("serialization", "validation", "mapping", "optimizer", *(f"strategies.{name}" for name in UPSTREAM_LOGS))
    for name in modules:
        assert import_module(f"ckpt.dist_checkpointing.{name}").logger.name == f"ckpt.dist_checkpointing.{name}"
    assert import_module("ckpt.dist_checkpointing.strategies.async_utils").logger.name.endswith(".async_utils")
    assert zarr.numpy_to_torch_dtype_dict[np.dtype("float32")] is torch.float32
    assert zarr.numpy_to_torch_dtype_dict[np.dtype("bfloat16")] is torch.bfloat16
    assert {zarr.numpy_to_torch_dtype_dict[found] for found in zarr.torch_to_numpy_dtype_dict.values()} == {
        one for one in STORABLE if zarr_name(one) not in AS_INTEGERS
    }
    assert all(np.dtype(found).itemsize == dtype.itemsize for dtype, found in zarr.torch_to_numpy_dtype_dict.items())
    assert common.COMMON_STATE_FNAME == "common.pt"
    assert isinstance(base.async_calls, AsyncCallsQueue) and base.async_calls.get_num_unfinalized_calls() == 0

    @timed(verbose=False)
    def a_function_of_the_program() -> None: ...

    a_function_of_the_program()
    assert len(two_stage.timers.pop("a_function_of_the_program")) == 1


UPSTREAM_LOGS = ("common", "tensorstore", "two_stage", "zarr")
"""Modules of strategies that have a `logger` there."""


def test_a_class_that_declares_nothing_still_has_to_check_for_itself() -> None:
    """S1.5: no check is ever inherited empty."""

    class Undeclared(LoadsCommon):
        check_backend_compatibility = LoadStrategyBase.check_backend_compatibility

    with pytest.raises(TypeError, match="abstract method '?check_backend_compatibility"):
        Undeclared()


# What is given


def test_objects_are_listed_by_whom_handles_them_alone() -> None:
    """S1.10: `{}` when it cannot handle sharded objects, otherwise it must say."""

    class WithObjects(LoadsCommon):
        can_handle_sharded_objects = property(lambda self: True)

    assert LoadsCommon().load_sharded_metadata(NOWHERE) == {}
    with pytest.raises(NotImplementedError, match="^WithObjects loads sharded objects, and does not list them$"):
        WithObjects().load_sharded_metadata(NOWHERE)


def test_the_metadata_of_a_strategy_without_objects_are_those_of_its_tensors() -> None:
    """S1.12, S1.13: by tensor key, global shape and data type; the fallback when objects are not handled."""

    class WithObjects(LoadsSharded):
        can_handle_sharded_objects = property(lambda self: True)

    (key, weight), *others = LoadsSharded().load_sharded_metadata(NOWHERE).items()
    assert (key, weight.global_shape, weight.dtype, weight.data, others) == ("w", (4, 3), torch.float32, None, [])
    with pytest.raises(NotImplementedError, match="^WithObjects loads sharded objects, and does not list them$"):
        WithObjects().load_sharded_metadata(NOWHERE)


def test_what_is_optional_says_who_does_not_do_it() -> None:
    """S1.14, S1.16: NotImplementedError of the base, with a sentence."""
    with pytest.raises(NotImplementedError, match="^LoadsSharded cannot remove tensors from nowhere$"):
        LoadsSharded().remove_sharded_tensors("nowhere", "optimizer.")
    with pytest.raises(NotImplementedError, match=r"^SavesCommon\(json, 1\) does not save sharded objects$"):
        SavesCommon("json", 1).save_sharded_objects({}, NOWHERE)


def test_an_async_strategy_is_scheduled_by_its_caller(tmp_path: Path) -> None:
    """S1.18: `async_save` only prepares; what training changes meanwhile is not saved."""
    value = torch.arange(6, dtype=torch.int64)
    request = Folder("folder", 1).async_save({"w": value}, tmp_path)
    before = value.numpy().tobytes()
    value += 100
    assert list(tmp_path.iterdir()) == []
    queue = AsyncCallsQueue()
    assert queue.schedule_async_request(request) == 0
    assert not (tmp_path / "done").exists()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert ((tmp_path / "w").read_bytes(), (tmp_path / "done").exists()) == (before, True)


def test_an_async_strategy_is_usable_synchronously(tmp_path: Path) -> None:
    """S1.19: when `save` returns, all is written and finalized; when it raises, nothing is finalized."""
    value = torch.arange(6, dtype=torch.int64)
    Folder("folder", 1).save({"w": value}, tmp_path)
    assert ((tmp_path / "w").read_bytes(), (tmp_path / "done").exists()) == (value.numpy().tobytes(), True)
    with pytest.raises(CheckpointError, match="^save of .*missing: No such file or directory"):
        Folder("folder", 1).save({"w": value}, tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


# The registry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[tuple[str, int], Any]]:
    """An empty registry, in which no backend has been asked for yet."""
    empty: dict[str, dict[tuple[str, int], Any]] = {action.value: {} for action in StrategyAction}
    monkeypatch.setattr(base, "default_strategies", empty)
    return empty


@pytest.fixture
def brings(registry: dict[str, dict[tuple[str, int], Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give the backend "lazy" a module of this source, whose `register` brings its strategies when it is first asked for."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> None:
        (tmp_path / "brought_by_a_test.py").write_text(source)
        monkeypatch.setattr(base, "_FILLED_BY", {"lazy": ("brought_by_a_test:register",)})

    yield write
    sys.modules.pop("brought_by_a_test", None)


BRINGS_TWO = """
from ckpt.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from tests.unit.dist_checkpointing.test_strategy_interfaces import LoadsSharded, SavesSharded

def register():
    register_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1, LoadsSharded())
    register_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 1, SavesSharded("lazy", 1))
"""


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("action", StrategyAction)
def test_a_registered_instance_is_the_default_for_its_action_and_format_alone(action: StrategyAction) -> None:
    """S1.1, S1.3: per action, keyed by (backend, version): the format is one thing, the algorithm another."""
    register_default_strategy(action, "mine", 1, EXAMPLES[action])
    assert get_default_strategy(action, "mine", 1) is EXAMPLES[action]
    for other in StrategyAction:
        for backend, version in [("mine", 2), ("yours", 1), *([("mine", 1)] if other is not action else [])]:
            with pytest.raises(ConfigurationError, match=rf"\({other.value}, {backend}, {version}\)"):
                get_default_strategy(other, backend, version)


@pytest.mark.usefixtures("registry")
def test_a_later_registration_replaces_an_earlier_one() -> None:
    """S1.3: later registration replaces."""
    first, second = SavesSharded("mine", 1), Folder("mine", 1)
    for strategy in (first, second):
        register_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 1, strategy)
        assert get_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 1) is strategy


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SavesSharded, "the class SavesSharded"),
        (LoadsSharded(), "a LoadsSharded"),
        (SavesCommon("json", 1), "a SavesCommon"),
    ],
)
def test_what_is_no_strategy_for_the_action_is_refused_when_it_is_registered(given: Any, says: str) -> None:
    """S1.3: it stores an instance."""
    with pytest.raises(ConfigurationError) as caught:
        register_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 1, given)
    assert str(caught.value) == (
        f"{says} cannot be the default strategy for (save_sharded, mine, 1); give an instance of a SaveShardedStrategy"
    )


def test_a_backend_registers_its_strategies_when_it_is_first_asked_for(brings: Any) -> None:
    """S1.4: lazily, and once."""
    brings(BRINGS_TWO)
    assert "brought_by_a_test" not in sys.modules
    save = get_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 1)
    load = get_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1)
    assert (type(save).__name__, type(load).__name__) == ("SavesSharded", "LoadsSharded")
    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 1) is save
    assert get_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1) is load


def test_a_backend_s_own_strategies_never_replace_one_that_a_user_has_registered(brings: Any) -> None:
    """S1.3, S1.4: the lazy default is the earlier registration, whenever it happens."""
    brings(BRINGS_TWO)
    mine = Folder("lazy", 1)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 1, mine)
    assert type(get_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1)).__name__ == "LoadsSharded"
    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 1) is mine


@pytest.mark.parametrize(
    ("source", "cause", "remedy"),
    [
        ("import absent_library.deep", "needs the package absent_library, which is not installed", "absent_library"),
        (
            "from torch import no_such_name",
            rf"cannot be imported with torch {re.escape(metadata.version('torch'))}, which is installed: cannot import name 'no_such_name'",
            "--upgrade ckpt-coordinator torch",
        ),
        (
            "import ckpt.no_such_module",
            "cannot be imported with .*: No module named 'ckpt.no_such_module'",
            "--upgrade ckpt-coordinator",
        ),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero", "--upgrade ckpt-coordinator"),
    ],
)
def test_a_library_that_cannot_be_imported_is_named_with_the_way_to_install_it(
    brings: Any, source: str, cause: str, remedy: str
) -> None:
    """S1.4: a failed import becomes an error of ours with an install hint; the next time it is tried again."""
    brings(source)
    for _ in range(2):
        with pytest.raises(ConfigurationError) as caught:
            get_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1)
        message = str(caught.value)
        assert re.match(rf"the default strategy for \(load_sharded, lazy, 1\) {cause}", message)
        assert message.endswith(f": pip install {remedy}")
        assert caught.value.__cause__ is not None
    brings(BRINGS_TWO)
    assert type(get_default_strategy(StrategyAction.LOAD_SHARDED, "lazy", 1)).__name__ == "LoadsSharded"


def test_an_unknown_triple_is_named_together_with_what_is_known(brings: Any) -> None:
    """S1.4: one sentence."""
    brings(BRINGS_TWO)
    with pytest.raises(CheckpointError) as caught:
        get_default_strategy(StrategyAction.SAVE_SHARDED, "lazy", 7)
    assert str(caught.value) == (
        "there is no default strategy for (save_sharded, lazy, 7); registered are (save_sharded, lazy, 1); the backends "
        "lazy register theirs when asked for: give a strategy, or call register_default_strategy first"
    )


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("action", "backend"),
    [
        (StrategyAction.SAVE_SHARDED, "zarr"),
        (StrategyAction.LOAD_SHARDED, "zarr"),
        (StrategyAction.SAVE_SHARDED, "tensorstore"),
        (StrategyAction.LOAD_SHARDED, "tensorstore"),
        (StrategyAction.SAVE_COMMON, "json"),
        (StrategyAction.LOAD_COMMON, "json"),
        (StrategyAction.LOAD_COMMON, "torch"),
    ],
)
def test_every_format_of_this_package_brings_its_strategies(action: StrategyAction, backend: str) -> None:
    """S1.4: without any call before."""
    strategy = get_default_strategy(action, backend, 1)
    if isinstance(strategy, LoadStrategyBase):
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(1)
    else:
        assert (strategy.backend, strategy.version) == (backend, 1)
