"""Every wait, order and look of saves in the background, taken out of the product in turn: each time some test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.mutants import Mutant
from tests.device.test_mutants import require_found_out

ARENA = "tests/unit/memory/test_arena.py"
BYTES = "tests/distributed/test_async_bytes.py"
FAULTS = "tests/distributed/test_async_faults.py"
MEMORY = "tests/distributed/test_async_memory.py"
OVERLAP = "tests/distributed/test_async_overlap.py"
SIGTERM = "tests/distributed/test_async_sigterm.py"
DEVICE = "tests/device/test_async_on_device.py"

IN_TURN = f"{OVERLAP}::test_forward_and_backward_run_before_the_copy_is_complete_and_the_optimizers_step_after"
BUSY = f"{FAULTS}::test_a_save_that_begins_while_one_is_running_waits_is_skipped_or_queues"
ON_ITS_WAY = f"{DEVICE}::test_a_save_holds_what_was_on_its_way_at_the_call_and_nothing_later"

ON_HOST = [
    Mutant(
        "an optimizer steps while its tensors are copied",
        "ckpt/saving/background/background.py: Background.wait_for_snapshots",
        "pending.snapshot.wait()",
        "",
        (IN_TURN,),
    ),
    Mutant(
        "optimizers are not waited for at all",
        "ckpt/state/overlap.py: Optimizers.before_steps",
        "self._hooks.append(optimizer.register_step_pre_hook(_calling(wait)))",
        "(lambda _: None)(_calling(wait))",
        (IN_TURN,),
    ),
    Mutant(
        "what may change any time is copied when control has returned",
        "ckpt/saving/background/snapshot.py: Snapshot.take",
        "self._copy(now, digest=False)",
        "later = now + later",
        (IN_TURN,),
    ),
    Mutant(
        "nobody looks whether a tensor was written to",
        "ckpt/saving/background/snapshot.py: Snapshot._require_unchanged",
        "changed = self._watched.changed() if self._watched is not None else []",
        "changed: list[str] = []",
        (f"{OVERLAP}::test_a_tensor_that_is_written_to_before_it_is_copied_fails_the_save_with_its_name",),
    ),
    Mutant(
        "nobody looks whether the local part of a DTensor was written to",
        "ckpt/state/overlap.py: _version",
        "local_tensor(tensor)._version",
        "0",
        (f"{OVERLAP}::test_one_rank_whose_tensor_is_written_to_fails_the_save_on_all",),
    ),
    Mutant(
        "nobody looks whether the bytes are those that were copied",
        "ckpt/storage/sink.py: Pieces.written",
        "self._staged is not None and digests != self._staged",
        "False",
        (f"{BYTES}::test_a_bit_that_turns_between_the_snapshot_and_the_disk_is_refused_with_the_arrays_name",),
    ),
    Mutant(
        "memory is used again before it is written",
        "ckpt/saving/background/snapshot.py: Snapshot.items",
        "yield staged\nself._give_back_written()",
        "self._give_back_written()\nyield staged",
        (f"{MEMORY}::test_chunks_that_are_larger_than_the_budget_are_saved_all_the_same",),
    ),
    Mutant(
        "memory is made anew while it is written from",
        "ckpt/memory/host.py: Arena.grow",
        "self._free != ([(0, len(self._memory))] if len(self._memory) else [])",
        "False and self._free != ([(0, len(self._memory))] if len(self._memory) else [])",
        (f"{ARENA}::test_an_arena_that_is_large_enough_stays_and_one_that_grows_waits_until_nothing_is_taken",),
    ),
    Mutant(
        "who waits for room is not told that nobody will make any",
        "ckpt/saving/background/snapshot.py: Snapshot.give_up",
        "True",
        "False",
        (f"{OVERLAP}::test_a_step_that_waits_for_room_goes_on_when_the_disk_is_full",),
    ),
    Mutant(
        "memory that was being written when a save failed stays taken",
        "ckpt/saving/background/snapshot.py: Snapshot.give_up",
        "self._give_back_written()",
        "",
        (f"{FAULTS}::test_an_error_that_is_kept_keeps_no_memory",),
    ),
    Mutant(
        "a save takes the room that the one before needs",
        "ckpt/saving/background/background.py: Background.begin",
        "self.wait_for_snapshots()",
        "",
        (f"{OVERLAP}::test_two_saves_one_right_after_another_share_what_room_there_is",),
    ),
    Mutant(
        "parts of other ranks' chunks are sent when all is copied",
        "ckpt/saving/background/snapshot.py: Snapshot.take",
        "self._has_sends.set()\nnow, later = self._parted()",
        "now, later = self._parted()",
        (f"{MEMORY}::test_parts_of_chunks_are_sent_to_other_ranks_before_there_is_room_for_the_rest",),
    ),
    Mutant(
        "a save begins before the one before it is over",
        "ckpt/saving/background/background.py: Background._run",
        "before.wait()",
        "",
        (BUSY,),
    ),
    Mutant(
        "a save that is to wait does not",
        "ckpt/coordinator.py: CheckpointCoordinator.save_checkpoint",
        "self._saves.when_busy == 'wait'",
        "False",
        (BUSY,),
    ),
    Mutant(
        "a load begins while its tensors are copied",
        "ckpt/coordinator.py: CheckpointCoordinator.load_checkpoint",
        "self.maybe_finalize(blocking=True)",
        "",
        (f"{OVERLAP}::test_a_load_waits_for_the_copy_and_goes_back_to_the_state_of_the_call",),
    ),
    Mutant(
        "the interpreter ends before the last save has",
        "ckpt/saving/background/background.py: Background.__init__",
        "threading._register_atexit",
        "str",
        (f"{FAULTS}::test_a_program_that_never_closes_its_coordinator_ends_with_its_last_save_durable",),
    ),
    Mutant(
        "a process that is told to end does not wait for its saves",
        "ckpt/saving/background/background.py: Background.begin",
        "self._sigterm.arm()",
        "",
        (f"{SIGTERM}::test_a_save_that_takes_less_than_the_grace_is_committed_before_the_process_ends",),
    ),
    Mutant(
        "a process that is told to end waits for its saves longer than it may",
        "ckpt/ranks/sigterm.py: SigtermDeferral._wait",
        "ends_at",
        "ends_at + 10",
        (f"{SIGTERM}::test_a_save_that_takes_longer_is_given_up_and_the_one_before_stays",),
    ),
    Mutant(
        "an error of the training loop is hidden by waiting for the save",
        "ckpt/coordinator.py: CheckpointCoordinator.__exit__",
        "error is None",
        "True",
        (f"{FAULTS}::test_it_is_not_hidden_by_an_error_of_that_save_either",),
    ),
    Mutant(
        "memory is kept by a coordinator that is closed",
        "ckpt/saving/background/background.py: Background.close",
        "self._arena.let_go()",
        "",
        (f"{FAULTS}::test_saves_leave_no_file_open_no_thread_no_process_and_no_memory[True]",),
    ),
    Mutant(
        "a checkpoint that is equal to an older one raises no alarm",
        "ckpt/saving/checkpoint_root.py: CheckpointRoot.publish",
        "alarms = self._stale_check.alarms(target.checkpoint_id, written.results)",
        "alarms: list[str] = []",
        (f"{BYTES}::test_the_alarm_is_raised_on_every_rank_alike",),
    ),
]

ON_DEVICE = [
    Mutant(
        "what comes from a device is digested before it has arrived",
        "ckpt/memory/copies.py: _Started.arrived",
        "batch.mark.wait()",
        "",
        (ON_ITS_WAY,),
    ),
    Mutant(
        "an optimizer steps while its tensors come from the device",
        "ckpt/saving/background/background.py: Background.wait_for_snapshots",
        "pending.snapshot.wait()",
        "",
        (f"{DEVICE}::test_what_is_copied_beside_training_is_complete_before_the_optimizers_step",),
    ),
]


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", ON_HOST, ids=[mutant.name for mutant in ON_HOST])
def test_a_save_in_the_background_that_does_not_wait_is_found_out(mutant: Mutant, tmp_path: Path) -> None:
    require_found_out(mutant, tmp_path)


@pytest.mark.npu
@pytest.mark.mutants
@pytest.mark.parametrize("mutant", ON_DEVICE, ids=[mutant.name for mutant in ON_DEVICE])
def test_a_save_of_a_device_in_the_background_that_does_not_wait_is_found_out(mutant: Mutant, tmp_path: Path) -> None:
    require_found_out(mutant, tmp_path)
