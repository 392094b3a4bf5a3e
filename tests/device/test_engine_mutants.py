"""Every wait of a weight sync, taken out of the product in turn: each time some test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.mutants import Mutant
from tests.device.test_mutants import require_found_out

LATE = "tests/device/test_engine_late_copies.py"

THREE_UPDATES = f"{LATE}::test_three_updates_hold_what_was_on_its_way_when_each_began_and_nothing_else"
BROADCAST, ONE_BUCKET = f"{THREE_UPDATES}[broadcast-2-2-True-npu]", f"{THREE_UPDATES}[broadcast-1-1-False-npu]"
NAIVE = f"{THREE_UPDATES}[naive-1-1-True-npu]"
PARTS = f"{LATE}::test_updates_of_which_parts_of_buckets_travel_hold_what_was_on_its_way_and_what_was_there[broadcast-True-False-False-npu]"
ON_TIME = f"{LATE}::test_parts_of_buckets_on_the_host_are_taken_when_they_came_and_replaced_when_they_left"
ANY_STREAM = f"{LATE}::test_what_is_yielded_to_a_rollout_may_be_copied_on_any_stream"
SLOW = f"{LATE}::test_memory_on_the_device_is_used_again_only_when_the_others_have_what_was_in_it"

ON_DEVICE = [
    Mutant(
        "a trainer digests buckets before they are on its host",
        "ckpt/engine/wire/pool.py: HostPool.seal",
        "self._settle()",
        "",
        (NAIVE,),
    ),
    Mutant(
        "copies of an update that failed come over those of the next",
        "ckpt/engine/wire/pool.py: HostPool.put",
        "self._settle()",
        "",
        (f"{LATE}::test_copies_that_an_update_has_left_when_it_failed_do_not_come_over_those_of_the_next",),
    ),
    Mutant(
        "nobody notes which devices buckets come from",
        "ckpt/engine/wire/pool.py: HostPool.put",
        "self._devices.add(tensor.device)",
        "",
        (NAIVE,),
    ),
    Mutant(
        "a live model is said to be of the new version before its copies are over",
        "ckpt/engine/live_model.py: LiveModel.load",
        "wait_for_all(memories)\nself._torn, self.version = (False, version)",
        "self._torn, self.version = (False, version)",
        (NAIVE,),
    ),
    Mutant(
        "a live model is changed while work of its readers is queued",
        "ckpt/engine/live_model.py: LiveModel.load",
        "wait_for_all(memories)\nself._torn, self.version = (True, None)",
        "self._torn, self.version = (True, None)",
        (f"{LATE}::test_what_a_rollout_has_queued_while_it_read_one_version_reads_that_one", NAIVE),
    ),
    Mutant(
        "memory of tensors that were yielded is used again while somebody copies from them",
        "ckpt/engine/stream.py: on_device",
        "wait_for(device)\nif len(ring) < aligned(host.nbytes):\n    ring = device_memory(max(aligned(host.nbytes), ring_bytes), device)",
        "pass\nif len(ring) < aligned(host.nbytes):\n    ring = device_memory(max(aligned(host.nbytes), ring_bytes), device)",
        (ANY_STREAM,),
    ),
    Mutant(
        "a tensor is yielded before it is on the device",
        "ckpt/engine/stream.py: on_device",
        "wait_for(device)\nused += aligned(host.nbytes)",
        "used += aligned(host.nbytes)",
        (ANY_STREAM,),
    ),
    Mutant(
        "memory of the last tensor is let go of while somebody copies from it",
        "ckpt/engine/stream.py: on_device",
        "for name, host in weights:\n    ...\nwait_for(device)",
        "for name, host in weights:\n    ...",
        (ANY_STREAM,),
    ),
    Mutant(
        "half of the device memory is filled while it is being sent",
        "ckpt/engine/wire/buffers.py: Buffers.broadcast",
        "left()",
        "",
        (SLOW, ONE_BUCKET),
    ),
    Mutant(
        "a bucket is copied to the host before it has come over the network",
        "ckpt/engine/wire/buffers.py: _finish",
        "wait()",
        "",
        (BROADCAST,),
    ),
    Mutant(
        "a bucket has come before its copy to the host is over",
        "ckpt/engine/wire/buffers.py: _finish",
        "side.wait()",
        "",
        (BROADCAST,),
    ),
    Mutant(
        "the copy to the host waits for the network on one stream and runs on another",
        "ckpt/engine/wire/buffers.py: _finish",
        "with side:\n    wait()\n    if there is not None:\n        scatter(there, buffer, runs)",
        "if True:\n    wait()\n    if there is not None:\n        scatter(there, buffer, runs)",
        (BROADCAST,),
    ),
    Mutant(
        "blocks are compared before they are on the trainer's host",
        "ckpt/engine/wire/pool.py: HostPool.seal",
        "self._settle()",
        "",
        (PARTS,),
    ),
    Mutant(
        "parts of a bucket are put in place before they are on the host",
        "ckpt/engine/wire/buffers.py: _finish",
        "side.wait()",
        "",
        (PARTS,),
    ),
]
INFERENCE = (
    "tests/distributed/test_engine_inference.py::test_the_packages_own_extension_loads_every_bit_of_three_updates"
)
ON_DEVICE.append(
    Mutant(
        "workers of an inference engine are told of tensors that have not arrived in their buffer",
        "ckpt/engine/inference/inference.py: InferenceOutlet._fill",
        "wait_for(device)",
        "",
        (f"{INFERENCE}[npu]",),
    )
)
ON_HOST = [
    Mutant(
        "what workers of an inference engine are loading is overwritten",
        "ckpt/engine/inference/inference.py: InferenceOutlet._serve",
        "number % 2 * self._half",
        "0",
        (f"{INFERENCE}[cpu]",),
    ),
    Mutant(
        "a bucket is looked at before it has come",
        "ckpt/engine/wire/transfer.py: _land",
        "wait()",
        "",
        (f"{LATE}::test_broadcast_on_the_host_looks_at_a_bucket_when_it_has_come_and_not_before",),
    ),
    Mutant(
        "parts of a bucket are put in place before they have come",
        "ckpt/engine/wire/buffers.py: _finish",
        "wait()",
        "",
        (f"{ON_TIME}[trainer]",),
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
