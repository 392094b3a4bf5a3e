"""Every wait of a weight sync, taken out of the product in turn: each time some test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.test_mutants import Mutant, require_found_out

LATE = "tests/device/test_engine_late_copies.py"

THREE_UPDATES = f"{LATE}::test_three_updates_hold_what_was_on_its_way_when_each_began_and_nothing_else"
BROADCAST, ONE_BUCKET = f"{THREE_UPDATES}[broadcast-2-2-True-npu]", f"{THREE_UPDATES}[broadcast-1-1-False-npu]"
NAIVE, BY_THE_PACKAGE = f"{THREE_UPDATES}[naive-1-1-True-npu]", f"{THREE_UPDATES}[kimi_ckpt_engine:update-2-1-True-npu]"
PARTS = f"{LATE}::test_updates_of_which_parts_of_buckets_travel_hold_what_was_on_its_way_and_what_was_there[broadcast-True-False-False-npu]"
ON_TIME = f"{LATE}::test_parts_of_buckets_on_the_host_are_taken_when_they_have_come_and_replaced_when_they_have_left"
ANY_STREAM = f"{LATE}::test_what_is_yielded_to_a_rollout_may_be_copied_on_any_stream"
SLOW = f"{LATE}::test_memory_on_the_device_is_used_again_only_when_the_others_have_what_was_in_it"

ON_DEVICE = [
    Mutant(
        "a trainer digests buckets before they are on its host",
        "ckpt/engine/wire/pool.py",
        "        self._settle()\n        layout",
        "        layout",
        (NAIVE,),
    ),
    Mutant(
        "copies of an update that failed come over those of the next",
        "ckpt/engine/wire/pool.py",
        "            self._settle()  # copies",
        "            pass  # copies",
        (f"{LATE}::test_copies_that_an_update_has_left_when_it_failed_do_not_come_over_those_of_the_next",),
    ),
    Mutant(
        "nobody notes which devices buckets come from",
        "ckpt/engine/wire/pool.py",
        "            self._devices.add(tensor.device)\n",
        "",
        (NAIVE,),
    ),
    Mutant(
        "a live model is said to be of the new version before its copies are over",
        "ckpt/engine/live.py",
        "                wait_for_all(memories)\n                self._torn",
        "                self._torn",
        (NAIVE,),
    ),
    Mutant(
        "a live model is changed while work of its readers is queued",
        "ckpt/engine/live.py",
        "                wait_for_all(memories)  #",
        "                #",
        (f"{LATE}::test_what_a_rollout_has_queued_while_it_read_one_version_reads_that_one", NAIVE),
    ),
    Mutant(
        "memory of tensors that were yielded is used again while somebody copies from them",
        "ckpt/engine/wire/ring.py",
        "            wait_for(device)  # whoever",
        "            pass  # whoever",
        (ANY_STREAM,),
    ),
    Mutant(
        "a tensor is yielded before it is on the device",
        "ckpt/engine/wire/ring.py",
        "        there.copy_(host, non_blocking=True)\n        wait_for(device)\n",
        "        there.copy_(host, non_blocking=True)\n",
        (ANY_STREAM,),
    ),
    Mutant(
        "memory of the last tensor is let go of while somebody copies from it",
        "ckpt/engine/wire/ring.py",
        "    wait_for(device)  # the same, of the last\n",
        "",
        (ANY_STREAM,),
    ),
    Mutant(
        "half of the device memory is filled while it is being sent",
        "ckpt/engine/wire/transfer.py",
        "            taken()  # nothing",
        "            pass  # nothing",
        (SLOW, ONE_BUCKET),
    ),
    Mutant(
        "a bucket is copied to the host before it has come over the network",
        "ckpt/engine/wire/transfer.py",
        "        wait()  # some",
        "        pass  # some",
        (BROADCAST,),
    ),
    Mutant(
        "a bucket has come before its copy to the host is over",
        "ckpt/engine/wire/transfer.py",
        "    side.wait()\n",
        "",
        (BROADCAST,),
    ),
    Mutant(
        "the copy to the host waits for the network on one stream and runs on another",
        "ckpt/engine/wire/transfer.py",
        "    with side:\n        wait()  # some collectives make the stream wait, and not us\n        if there",
        "    if True:\n        wait()\n        if there",
        (BROADCAST,),
    ),
    Mutant(
        "blocks are compared before they are on the trainer's host",
        "ckpt/engine/wire/pool.py",
        "        self._settle()\n        layout",
        "        layout",
        (PARTS,),
    ),
    Mutant(
        "parts of a bucket are put in place before they are on the host",
        "ckpt/engine/wire/transfer.py",
        "    side.wait()\n",
        "",
        (PARTS,),
    ),
    Mutant(
        "what the package brings is digested before it is on the host",
        "ckpt/engine/kimi.py",
        "                    wait_for(bucket.device)\n",
        "",
        (BY_THE_PACKAGE,),
    ),
]
INFERENCE = (
    "tests/distributed/test_engine_inference.py::test_the_packages_own_extension_loads_every_bit_of_three_updates"
)
ON_DEVICE.append(
    Mutant(
        "workers of an inference engine are told of tensors that have not arrived in their buffer",
        "ckpt/engine/inference/inference.py",
        "            wait_for(device)\n\n    def _let_go",
        "            pass\n\n    def _let_go",
        (f"{INFERENCE}[npu]",),
    )
)
ON_HOST = [
    Mutant(
        "what workers of an inference engine are loading is overwritten",
        "ckpt/engine/inference/inference.py",
        "start = number % 2 * self._half",
        "start = 0",
        (f"{INFERENCE}[cpu]",),
    ),
    Mutant(
        "a bucket is looked at before it has come",
        "ckpt/engine/wire/transfer.py",
        "    wait()\n    tell(bucket)\n",
        "    tell(bucket)\n",
        (f"{LATE}::test_broadcast_on_the_host_looks_at_a_bucket_when_it_has_come_and_not_before",),
    ),
    Mutant(
        "parts of a bucket are put in place before they have come",
        "ckpt/engine/wire/parts.py",
        "            wait()\n            if ours is None and there",
        "            if ours is None and there",
        (f"{ON_TIME}[trainer]",),
    ),
    Mutant(
        "two messages on their way share their memory",
        "ckpt/engine/wire/parts.py",
        "self._count % len(self._memory), bytes_of",
        "0, bytes_of",
        (f"{ON_TIME}[rollout]",),
    ),
]


@pytest.mark.npu
@pytest.mark.mutants
@pytest.mark.parametrize("mutant", ON_DEVICE, ids=[mutant.name for mutant in ON_DEVICE])
def test_a_weight_sync_on_devices_that_does_not_wait_is_found_out(mutant: Mutant, tmp_path: Path) -> None:
    require_found_out(mutant, tmp_path)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", ON_HOST, ids=[mutant.name for mutant in ON_HOST])
def test_a_weight_sync_that_does_not_wait_is_found_out(mutant: Mutant, tmp_path: Path) -> None:
    require_found_out(mutant, tmp_path)
