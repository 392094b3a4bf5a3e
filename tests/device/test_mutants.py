"""Every wait, every stream and every guard of memory in use, taken out of the product in turn: each time some test fails."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.mutants import Mutant, mutated

CHECKOUT = Path(__file__).resolve().parents[2]
COPIES = "tests/device/test_copies.py"
LATE = "tests/device/test_late_copies.py"
TWO_STAGE = "tests/device/test_two_stage_on_device.py"


MUTANTS = [
    Mutant(
        "a side stream begins before what was queued on the device is done",
        "ckpt/memory/device.py: SideStream.__init__",
        "wait_for(device)",
        "",
        (f"{COPIES}::test_what_was_queued_before_is_in_what_comes_to_the_host",),
    ),
    Mutant(
        "a mark is waited for by nobody",
        "ckpt/memory/device.py: StreamEvent.wait",
        "self._event.synchronize()",
        "",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "a mark stands nowhere",
        "ckpt/memory/device.py: SideStream.mark",
        "event.record(self._stream)",
        "",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "what is staged is looked at before it has arrived",
        "ckpt/memory/copies.py: _Started.arrived",
        "batch.mark.wait()",
        "",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "two tensors on their way share the pinned memory",
        "ckpt/memory/copies.py: Halves.__call__",
        "self._count % HALVES",
        "0",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "tensors are staged on the program's own stream",
        "ckpt/memory/copies.py: Staging._start_batch",
        "with side:\n    ...",
        "with nullcontext():\n    ...",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "pinned memory is read into while it is copied from",
        "ckpt/memory/copies.py: _Half.free",
        "self.in_use.pop().wait",
        "self.in_use.pop",
        (f"{COPIES}::test_memory_is_read_into_again_only_when_its_bytes_have_gone",),
    ),
    Mutant(
        "nobody notes that pinned memory is copied from",
        "ckpt/memory/copies.py: Filling.place",
        "self._half().in_use.append(side.mark())",
        "",
        (f"{COPIES}::test_memory_is_read_into_again_only_when_its_bytes_have_gone",),
    ),
    Mutant(
        "bytes are placed on the program's own stream",
        "ckpt/memory/copies.py: Filling.place",
        "with side:\n    ...",
        "with nullcontext():\n    ...",
        (f"{COPIES}::test_memory_is_read_into_again_only_when_its_bytes_have_gone",),
    ),
    Mutant(
        "a load returns before its copies are over",
        "ckpt/memory/copies.py: Filling.close",
        "self._streams.wait()",
        "",
        (f"{COPIES}::test_what_was_queued_before_does_not_overwrite_what_is_filled_and_any_stream_sees_it",),
    ),
    Mutant(
        "memory on the device is let go of while it is copied from",
        "ckpt/memory/copies.py: Filling.place_within",
        "side.wait()",
        "",
        (f"{COPIES}::test_bytes_of_others_may_be_overwritten_as_soon_as_they_are_placed",),
    ),
    Mutant(
        "a decoded tensor is filled before what was queued for it",
        "ckpt/memory/copies.py: Filling.fill",
        "self._streams.on(out.device)",
        "nullcontext()",
        (f"{COPIES}::test_a_decoded_tensor_goes_to_any_strides",),
    ),
    Mutant(
        "ranks compare what has not arrived",
        "ckpt/state/collect.py: collect",
        "wait_for_all(_memory_of(leaves))",
        "",
        (f"{LATE}::test_ranks_compare_and_save_what_was_on_its_way_to_each",),
    ),
    Mutant(
        "a load begins before what was queued for its tensors is done",
        "ckpt/loading/loader.py: Loader._read",
        "wait_for_all((request.out for match in going for request in match.requests))",
        "",
        (f"{LATE}::test_an_old_folder_of_pickled_files_is_loaded_after_all_that_was_queued",),
    ),
    Mutant(
        "dist_checkpointing.load begins before what was queued for its tensors is done",
        "ckpt/dist_checkpointing/folder/loading.py: load_tensors",
        "wait_for_all((tensor.data for tensor in tensors if tensor.data is not None))",
        "",
        (f"{LATE}::test_ckpt_load_waits_where_it_converts_the_data_type",),
    ),
    Mutant(
        "dist_checkpointing.save in the background leaves the tensors where they are when it returns",
        "ckpt/dist_checkpointing/folder/saving.py: FolderSave.write",
        "self._save.write(self._snapshot, RankWritePlan.write, self._topology)",
        "self._save.write(self._save.live_tensors(), RankWritePlan.write, self._topology)",
        (f"{LATE}::test_ckpt_save_and_ckpt_load_wait_alike",),
    ),
    Mutant(
        "a block travels before it is on the device",
        "ckpt/loading/two_stage/slots.py: Slots.memory",
        "self.on_device.wait(slot)",
        "",
        (f"{LATE}::test_a_load_in_two_stages_comes_after_all_that_was_queued_and_is_over_when_it_returns",),
    ),
    Mutant(
        "blocks are copied to the device on the reader's own stream, which nobody marks",
        "ckpt/loading/two_stage/slots.py: DeviceSlots.bring",
        "with self._reading:\n    ...",
        "with nullcontext():\n    ...",
        (f"{LATE}::test_a_load_in_two_stages_comes_after_all_that_was_queued_and_is_over_when_it_returns",),
    ),
    Mutant(
        "a block is taken before it has come over the network",
        "ckpt/loading/two_stage/slots.py: DeviceSlots.carry.finish",
        "done.wait()",
        "",
        (f"{LATE}::test_a_load_in_two_stages_comes_after_all_that_was_queued_and_is_over_when_it_returns",),
    ),
    Mutant(
        "an optional component is still being copied when the load returns",
        "ckpt/loading/strategy.py: convert_into",
        "wait_for_all(outs)",
        "",
        (f"{LATE}::test_an_optional_component_is_whole_when_the_load_returns",),
    ),
    Mutant(
        "a background save begins before the copies that it was left",
        "ckpt/saving/background/async_utils.py: AsyncRequest.preload",
        "wait_for_accelerator()",
        "",
        (f"{LATE}::test_copies_that_a_preload_leaves_under_way_are_over_before_its_function_runs",),
    ),
    Mutant(
        "the network is used on the program's own stream",
        "ckpt/loading/two_stage/slots.py: DeviceSlots.carry",
        "with self._network:\n    wait = begin()",
        "with nullcontext():\n    wait = begin()",
        (f"{TWO_STAGE}::test_the_network_does_not_wait_for_what_the_program_has_queued_since",),
    ),
    Mutant(
        "only the stream in use is waited for",
        "ckpt/memory/device.py: wait_for",
        "torch.get_device_module(device).synchronize(device)",
        "torch.get_device_module(device).current_stream(device).synchronize()",
        (f"{LATE}::test_a_direct_load_comes_after_all_that_was_queued_and_is_over_when_it_returns",),
    ),
    Mutant(
        "only one device of several is waited for",
        "ckpt/memory/device.py: wait_for_all",
        "{tensor.device for tensor in tensors}",
        "list({tensor.device for tensor in tensors})[:1]",
        (f"{LATE}::test_an_old_folder_of_pickled_files_is_loaded_after_all_that_was_queued",),
    ),
    Mutant(
        "a load in two stages waits for whole devices while ranks wait for each other",
        "ckpt/loading/two_stage/spread_worker.py: TwoStageReading.run",
        "filling.begin(self.wants.devices)",
        "",
        (f"{TWO_STAGE}::test_once_ranks_wait_for_each_other_none_waits_for_its_whole_device",),
    ),
    Mutant(
        "slots are let go of while they are copied to",
        "ckpt/loading/two_stage/slots.py: DeviceSlots.close",
        "self._reading.wait()",
        "",
        (f"{TWO_STAGE}::test_no_copy_is_under_way_to_slots_that_are_let_go_of",),
    ),
    Mutant(
        "every save has streams of its own",
        "ckpt/memory/device.py: SideStream.__init__",
        "(device, role) not in _streams",
        "True",
        (f"{COPIES}::test_what_is_taken_on_the_device_is_the_same_memory_every_time",),
    ),
    Mutant(
        "a piece through little pinned memory is read before it has come",
        "ckpt/memory/copies.py: _land",
        "mark.wait()",
        "",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
    Mutant(
        "pieces through little pinned memory share it",
        "ckpt/memory/copies.py: _brought_through",
        "number % HALVES * step",
        "0",
        (f"{COPIES}::test_tensors_come_to_the_host_bit_for_bit_whatever_room_there_is",),
    ),
]


@pytest.mark.npu
@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_program_that_does_not_wait_is_found_out(mutant: Mutant, tmp_path: Path) -> None:
    require_found_out(mutant, tmp_path)


def all_mutants() -> list[Mutant]:
    from tests.device import test_async_mutants, test_engine_mutants

    return [
        *MUTANTS,
        *test_async_mutants.ON_HOST,
        *test_async_mutants.ON_DEVICE,
        *test_engine_mutants.ON_HOST,
        *test_engine_mutants.ON_DEVICE,
    ]


def test_every_mutant_changes_what_its_function_holds_once() -> None:
    for mutant in all_mutants():
        text = (CHECKOUT / mutant.file).read_text()
        assert mutated(mutant, text) != ast.unparse(ast.parse(text)), mutant.name


def test_every_mutant_has_a_killer_that_is_run(request: pytest.FixtureRequest) -> None:
    """A killer is one case, or all cases of a test that a run tries by default."""
    collected: dict[str, list[pytest.Item]] = {}
    missing = []
    for mutant in all_mutants():
        for killer in mutant.killers:
            file = killer.partition("::")[0]
            if file not in collected:
                collected[file] = _tests_of(file, request.session)
            if not any(_is_run(item, killer) for item in collected[file]):
                missing.append(f"{mutant.name}: {killer}")
    assert missing == []


def _tests_of(file: str, session: pytest.Session) -> list[pytest.Item]:
    module = pytest.Module.from_parent(session, path=CHECKOUT / file)
    return [one for one in module.collect() if isinstance(one, pytest.Item)]


def _is_run(item: pytest.Item, killer: str) -> bool:
    name = killer.partition("::")[2]
    return item.name == name or (item.name.partition("[")[0] == name and item.get_closest_marker("full") is None)


def require_found_out(mutant: Mutant, tmp_path: Path) -> None:
    """Change a copy of the checkout, and run the tests there."""
    for folder in ("ckpt", "recipes", "conf", "tests"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    file = tmp_path / mutant.file
    file.write_text(mutated(mutant, file.read_text()))
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            tmp_path / "tmp",
            "-m",
            "not mutants" if any("[" in killer for killer in mutant.killers) else "not mutants and not full",
            *mutant.killers,
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert outcome.returncode == pytest.ExitCode.TESTS_FAILED, outcome.stdout
