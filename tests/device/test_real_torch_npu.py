"""Our device layer, and saves and loads, through the real torch_npu wheel, on stub CANN libraries: `pytest -m torch_npu`.

What is real here and what is not: tests/torch_npu_stub/README.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zarr

from ckpt.format import zarr_dtypes
from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import state_digest
from tests.device.real_torch_npu import RealTorchNpu, UnavailableError, once, prepare
from tests.support.states import BACKENDS, Held, cpu, global_index
from tests.torch_npu_stub import build, cases

pytestmark = pytest.mark.torch_npu

ALONE = Topology.alone()
LATE = 2_000  # microseconds
VERY_LATE = 300_000


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest) -> RealTorchNpu:
    if "torch_npu" not in request.config.getoption("markexpr"):
        pytest.skip("torch_npu is installed and run only when asked for: pytest -m torch_npu")
    try:
        return prepare()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("autoload", [1, 0], ids=["loaded by torch", "loaded by us"])
def test_the_environment_holds_the_versions_that_constraints_name(real: RealTorchNpu, autoload: int) -> None:
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    said = real.case("what_the_wheel_is", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert said == [pinned["torch"], pinned["torch_npu"], "npu:0", "cpu:gloo,npu:hccl"]


def test_a_rank_without_a_device_of_its_own_is_told_how_many_there_are(real: RealTorchNpu) -> None:
    said = real.case("each_rank_has_its_device", ACL_STUB_DEVICES=2)
    assert said.startswith(
        "DeviceUnavailableError: device=npu: local rank 2 has no device of its own, this host shows 2;"
    )


def test_a_host_without_devices_is_told_so(real: RealTorchNpu) -> None:
    said, _ = real.case("why_there_is_none", ACL_STUB_DEVICES=0)
    assert said.startswith("DeviceUnavailableError: device=npu: torch 2.")
    assert said.endswith("sees no npu device on this machine; choose device=cpu")


def test_memory_figures_are_those_of_the_device(real: RealTorchNpu) -> None:
    real.case("memory_is_counted", ACL_STUB_MEMORY=256 << 20)


def test_memory_that_a_device_has_not_is_one_sentence(real: RealTorchNpu) -> None:
    said = real.case("memory_that_is_not_there", ACL_STUB_MEMORY=256 << 20)
    assert said.startswith(
        "DeviceMemoryError: device=npu: npu:0 has no room for 512.0 MiB more, 256.0 MiB of 256.0 MiB"
    )


def test_the_random_generator_of_the_device_comes_back(real: RealTorchNpu, tmp_path: Path) -> None:
    real.case("random_state", tmp_path)


def test_torch_takes_the_collectives_as_the_device_names_them(real: RealTorchNpu) -> None:
    real.case("collectives_are_named_as_torch_takes_them")


@pytest.mark.parametrize("case", ["pinned_memory", "every_data_type_there_and_back"])
def test_copies_keep_every_bit(real: RealTorchNpu, case: str) -> None:
    real.case(case, ACL_STUB_COPY_DELAY_US=100)


@pytest.mark.parametrize(
    "case",
    ["a_copy_to_the_host_is_late", "a_copy_to_the_device_is_late", "a_side_stream_begins_behind_what_was_queued"],
)
def test_streams_and_events_order_copies_as_we_rely_on(real: RealTorchNpu, case: str) -> None:
    real.case(case, ACL_STUB_COPY_DELAY_US=VERY_LATE)


def test_what_the_stub_cannot_do_is_an_error_and_not_a_wrong_result(real: RealTorchNpu) -> None:
    assert "Add" in real.case("a_kernel_that_nobody_wrote_is_an_error")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_saved_on_the_device_is_the_same_on_cpu(real: RealTorchNpu, tmp_path: Path, backend: str) -> None:
    digest = real.case("saved", tmp_path, backend, 3, ACL_STUB_COPY_DELAY_US=LATE)
    want = cases.tensors(3)
    held = {name: Held({key: torch.empty_like(one) for key, one in of.items()}) for name, of in want.items()}
    cases.load(cpu(), str(tmp_path), **held)
    for name, key, tensor in cases.each(want):
        cases.require(held[name].state[key], tensor, f"{name} {key}")
    assert state_digest(held, ALONE) == digest


def test_saves_and_loads_wait_for_what_is_under_way(real: RealTorchNpu, tmp_path: Path) -> None:
    real.case("waited_for", tmp_path, ACL_STUB_COPY_DELAY_US=VERY_LATE)


def test_zarr_alone_reads_what_was_saved_on_the_device(real: RealTorchNpu, tmp_path: Path) -> None:
    real.case("saved", tmp_path, "zarr", 5, ACL_STUB_COPY_DELAY_US=LATE)
    zarr_dtypes.register()
    for key, want in cases.tensors(5)["large"].items():
        got = zarr.open_array(tmp_path / "checkpoint-1" / "large" / key.replace(" ", "%20"), mode="r")[:]
        assert got.shape == tuple(want.shape)
        assert got.tobytes() == raw_bytes(want).numpy().tobytes(), key


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["direct", "two-stage"])
def test_a_state_saved_on_cpu_is_the_same_on_the_device(
    real: RealTorchNpu, tmp_path: Path, backend: str, strategy: str
) -> None:
    held = {name: Held(of) for name, of in cases.tensors(7).items()}
    cases.save(cpu(), str(tmp_path), backend, **held)
    digest = real.case("loaded", tmp_path, strategy, 7, ACL_STUB_COPY_DELAY_US=LATE)
    assert digest == state_digest(held, ALONE)


@pytest.mark.parametrize("library", cases.STRATEGIES)
def test_sharded_state_dicts_go_from_and_to_the_device(real: RealTorchNpu, tmp_path: Path, library: str) -> None:
    real.case("sharded", tmp_path, library, ACL_STUB_COPY_DELAY_US=LATE)


def test_a_device_without_room_for_a_bucket_is_filled_through_a_smaller_one(real: RealTorchNpu, tmp_path: Path) -> None:
    cases.save(cpu(), str(tmp_path), **{name: Held(of) for name, of in cases.tensors(9).items()})
    (said,) = real.case("loaded_where_a_bucket_has_no_room", tmp_path, 9, ACL_STUB_MEMORY=512 << 20)
    assert said.startswith("npu:0 has no room for a bucket of 8.0 MiB: loading through one of ")


def test_a_device_without_any_room_is_one_sentence(real: RealTorchNpu, tmp_path: Path) -> None:
    cases.save(cpu(), str(tmp_path), model=Held({"t": global_index((3000, 1000))}))
    said = real.case("loaded_where_nothing_has_room", tmp_path, ACL_STUB_MEMORY=128 << 20)
    assert "device=npu: npu:0 has no room for 0.1 MiB more, 0.0 MiB of 128.0 MiB are free" in said


# ---- failures before any device


def test_without_cann_the_sentence_names_cann(real: RealTorchNpu) -> None:
    said, _ = real.case("why_there_is_none", with_cann=False, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert said == (
        "DeviceUnavailableError: device=npu: torch_npu is installed without CANN (libhccl.so cannot be loaded): install the CANN "
        "toolkit and source its set_env.sh, or choose device=cpu"
    )


def test_a_run_without_cann_ends_with_that_sentence_alone(real: RealTorchNpu, tmp_path: Path) -> None:
    done = real.run("-m", "recipes.train", "device=npu", f"output_dir={tmp_path}/run", with_cann=False)
    assert done.returncode == 1
    assert "torch_npu is installed without CANN (libhccl.so cannot be loaded)" in done.printed
    assert "Traceback" not in done.printed


def test_a_run_on_the_cpu_does_not_mind_a_torch_npu_without_cann(real: RealTorchNpu, tmp_path: Path) -> None:
    done = real.run("-m", "recipes.train", "train.steps=2", f"output_dir={tmp_path}/run", with_cann=False)
    assert done.returncode == 0, done.printed
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_torch_npu_for_another_torch_is_refused_before_it_is_imported(real: RealTorchNpu, tmp_path: Path) -> None:
    about = tmp_path / "torch_npu-2.99.0.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: torch_npu", "Version: 2.99.0", "Requires-Dist: torch==2.99.0.*", ""]
    (about / "METADATA").write_text("\n".join(lines))
    said, imported = real.case("why_there_is_none", path=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=0)
    assert said.startswith(
        "DeviceUnavailableError: device=npu: torch_npu 2.99.0 is for torch ==2.99.0.*, and this is torch 2."
    )
    assert not imported


# ---- the environment itself


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TOOLS", ("gcc", "no-such-tool"))
    with pytest.raises(UnavailableError, match="need no-such-tool: install gcc and binutils"):
        prepare()


def test_an_environment_without_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_NPU_VENV", str(tmp_path))
    with pytest.raises(UnavailableError, match="there is no torch_npu in .*: name another environment"):
        prepare()


def test_what_was_begun_and_not_finished_is_made_anew(tmp_path: Path) -> None:
    made = tmp_path / "cache" / "made"

    def stop_half_way(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(made, stop_half_way)
    assert not made.exists()
    once(made, Path.mkdir)
    assert list(made.iterdir()) == []
    once(made, stop_half_way)
    assert list(made.iterdir()) == [], "what is there is not made again"
