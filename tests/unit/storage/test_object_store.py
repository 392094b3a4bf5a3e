"""Requests to an object store: conditions, repetition, errors in one line without a secret; and the writing of objects from buffers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigurationError, sentence
from ckpt.format.places import ObjectPath, as_place, place_of
from ckpt.storage.direct_io import Buffers
from ckpt.storage.objects import store as stores
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.objects.sink import NUM_THREADS, ObjectSink
from ckpt.storage.objects.store import Store, Tag, store_of
from ckpt.storage.stored import has_manifest
from tests.support.object_server import ObjectServer
from tests.support.states import sized

ROOT = ObjectPath("s3", "bucket", "root")
MIB = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(stores, "RETRY_S", 0.3)
    with ObjectServer() as server, server.used():
        yield server


@pytest.fixture(params=["s3", "gs", "memory"])
def store(request: pytest.FixtureRequest, server: ObjectServer) -> Store:
    found = store_of(ObjectPath(request.param, "bucket"))
    found.delete([one.key for one in found.below("")])
    return found


# addresses


@given(st.sampled_from(["s3", "gs", "az", "memory"]), st.lists(st.text("ab~%. -_+é", min_size=1, max_size=5), max_size=4))
def test_an_address_is_what_its_text_says(scheme: str, parts: list[str]) -> None:
    if any(part in (".", "..") for part in parts):
        return
    place = ObjectPath(scheme, "bucket", "/".join(parts))
    assert place_of(str(place)) == as_place(str(place), "x") == place
    assert (place / "a/b").relative_to(place).as_posix() == "a/b"
    assert (place / "a").parent == place and (place / "a").name == "a"


@pytest.mark.parametrize(
    "given_", ["s3://key:secret@bucket/run", "s3://bucket:9000/run", "s3://bucket/run?token=secret", "s3://bucket/a#secret"]
)
def test_an_address_with_a_secret_is_refused_without_it(given_: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        as_place(given_, "output_dir")
    assert "secret" not in str(refused.value)


def test_a_path_stays_a_path() -> None:
    assert as_place("./s3:/x", "x") == Path("s3:/x")
    assert as_place("file:///data/a%20b", "x") == Path("/data/a b")
    assert as_place("runs/x:y/z", "x") == Path("runs/x:y/z")


# requests


def test_what_is_put_is_found(store: Store) -> None:
    for number, key in enumerate(["a/b%2Fc", "a/d e~+", "a/é", "a/sub/x"]):
        store.put(key, memoryview(bytes([number]) * 10))
        assert bytes(store.get(key)[0]) == bytes([number]) * 10
    assert store.head("a/b%2Fc")[0] == 10
    assert [one.key for one in store.below("a")] == sorted(one.key for one in store.below("a"))
    assert {one.key for one in store.below("a")} == {"a/b%2Fc", "a/d e~+", "a/é", "a/sub/x"}
    folders, names = store.names("a")
    assert (folders, sorted(names)) == (["sub"], ["b%2Fc", "d e~+", "é"])
    assert bytes(store.get_range("a/é", 3, 100)) == bytes([2]) * 7
    assert bytes(store.get_range("a/é", 10, 20)) == bytes(store.get_range("a/é", 4, 4)) == b""
    store.copy("a/é", "b/é")
    store.delete(["a/é", "a/nothing", "a/sub/x"])
    assert [one.key for one in store.below("b")] == ["b/é"]
    assert len(list(store.below("a"))) == 2
    with pytest.raises(FileNotFoundError, match="there is no such object"):
        store.get("a/é")
    with pytest.raises(FileNotFoundError):
        store.head("a/é")


def test_a_put_with_a_condition_wins_or_says_that_it_has_not(store: Store) -> None:
    first = store.create("k", b"1")
    assert first is not None
    assert store.create("k", b"2") is None
    second = store.replace("k", b"3", first)
    assert second is not None and second != first
    assert store.replace("k", b"4", first) is None
    assert bytes(store.get("k")[0]) == b"3" and store.get("k")[1] == second
    assert store.replace("nothing", b"5", second) is None


def test_more_objects_than_a_page_of_a_list_are_all_listed(server: ObjectServer) -> None:
    store = store_of(ROOT)
    for number in range(1203):
        server.objects["bucket"][f"many/{number:04}/x"] = server.objects["bucket"].get("x") or _stored(store, server)
    assert len(list(store.below("many"))) == len(store.names("many")[0]) == 1203


def _stored(store: Store, server: ObjectServer) -> Any:
    store.put("x", b"x")
    return server.objects["bucket"]["x"]


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "lost", "half"])
def test_a_failure_that_passes_is_not_noticed(server: ObjectServer, fault: str) -> None:
    store = store_of(ROOT)
    server.fault = lambda number, operation, key: fault if number % 2 == 0 else None
    store.put("k", b"one")
    assert bytes(store.get("k")[0]) == b"one"
    tag = store.create("new", b"unique")
    assert tag is not None
    assert store.replace("new", b"other", tag) is not None
    assert [one.key for one in store.below("")] == ["k", "new"]
    store.delete(["k"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "the store refuses (500 InternalError)"),
        ("503", "the store refuses (503 SlowDown)"),
        ("429", "the store refuses (429 TooManyRequests)"),
        ("403", "the store denies access (403 "),
        ("expired", "the credentials have expired"),
        ("drop", "the store does not answer ("),
    ],
)
def test_a_failure_that_stays_is_one_sentence_with_the_address_and_no_more(
    server: ObjectServer, fault: str, said: str
) -> None:
    store = store_of(ROOT)
    server.fault = lambda number, operation, key: fault
    calls = [
        lambda: store.get("a/b"),
        lambda: store.put("a/b", b"x"),
        lambda: store.create("a/b", b"x"),
        lambda: store.replace("a/b", b"x", Tag('"1"', None)),
        lambda: store.copy("a/b", "c"),
        lambda: list(store.below("a/b")),
        lambda: store.names("a/b"),
    ]
    for call in calls:
        with pytest.raises(OSError) as refused:
            call()
        text = sentence(refused.value)
        assert text.startswith(said) and "'s3://bucket/a/b'" in text, text
        assert not any(secret in text for secret in ("a-secret", "nobody", "http", "list-type", "<", "\n"))


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop"])
@pytest.mark.parametrize("key", ["orange/x", "steps/checkpoint-416", "416 Range Not Satisfiable/x"])
def test_a_failed_read_is_no_end_of_an_object_whatever_its_name(server: ObjectServer, fault: str, key: str) -> None:
    store = store_of(ROOT)
    store.put(key, b"bytes")
    assert bytes(store.get_range(key, 5, 9)) == b""
    server.fault = lambda number, operation, key: fault
    with pytest.raises(OSError, match="the store "):
        store.get_range(key, 0, 5)


def test_a_bucket_that_is_not_there_is_no_missing_object(server: ObjectServer) -> None:
    store = store_of(ObjectPath("s3", "gone"))
    for call in (lambda: store.names("a"), lambda: list(store.below("a")), lambda: store.get("a"), lambda: store.put("a", b"x")):
        with pytest.raises(OSError, match="there is no such bucket") as refused:
            call()
        assert not isinstance(refused.value, FileNotFoundError)


def _use(address: str, answers: Any) -> None:
    try:
        store_of(ObjectPath("memory", address)).put("k", b"x")
    except ConfigurationError as error:
        answers.put(str(error))
    else:
        answers.put("it worked")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder whose files say what the environment does not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    stores.forget_clients()
    yield tmp_path / ".aws"
    stores.forget_clients()


def test_keys_region_and_endpoint_of_a_profile_are_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer() as server:
        (home / "credentials").write_text(
            "[default]\naws_access_key_id = wrong\n\n[mine]\naws_access_key_id = nobody\naws_secret_access_key = a%sec:ret\n"
        )
        mine = f"[profile mine]\nregion = eu-central-1\nendpoint_url = {server.url}\n"
        (home / "config").write_text(f"{mine}[profile sso]\nsso_session = x\n")
        monkeypatch.setenv("AWS_PROFILE", "mine")
        store = store_of(ObjectPath("s3", "bucket"))
        store.put("a", b"b")
        assert bytes(store.get("a")[0]) == b"b"
        for name in ("sso", "none"):
            monkeypatch.setenv("AWS_PROFILE", name)
            with pytest.raises(ConfigurationError, match=f"the profile {name} of AWS_PROFILE has no keys in ~/.aws") as refused:
                Store("s3", "bucket")
            assert "a%sec" not in str(refused.value)
        (home / "credentials").write_text("secret=x")
        with pytest.raises(ConfigurationError, match="credentials cannot be read: it is no file of profiles"):
            Store("s3", "bucket")


def test_keys_of_the_environment_come_before_those_of_a_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "credentials").write_text("[default]\naws_access_key_id = wrong\naws_secret_access_key = wrong\nregion = there\n")
    assert stores._profile("s3://bucket") == {"access_key_id": "wrong", "secret_access_key": "wrong", "region": "there"}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert stores._profile("s3://bucket") == {"region": "there"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "here")
    assert "region" not in stores._profile("s3://bucket")


def test_an_endpoint_that_is_no_url_is_refused_in_one_sentence(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "me:secret@127.0.0.1:5555")
    with pytest.raises(ConfigurationError, match="expected a URL, such as http://127.0.0.1:5555") as refused:
        Store("s3", "bucket")
    assert "secret" not in str(refused.value)


def test_what_the_client_itself_fails_at_is_an_error_of_the_object(server: ObjectServer) -> None:
    store = store_of(ObjectPath("s3", "bucket"))

    class PanicException(BaseException): ...

    def fails() -> None:
        raise PanicException("request valid: https://here/?key=secret")

    with pytest.raises(OSError, match="the client failed") as failed:
        store._again("get", "a", fails)
    assert "secret" not in sentence(failed.value) and failed.value.filename == "s3://bucket/a"


def test_a_store_that_does_not_answer_is_named_by_its_endpoint(server: ObjectServer) -> None:
    server.fault = lambda number, operation, key: "drop"
    with pytest.raises(OSError, match=rf"the store does not answer \(.*, at {server.url.removeprefix('http://')}\)"):
        store_of(ObjectPath("s3", "bucket")).get("a")


@pytest.mark.parametrize("given_", ["s3:bucket/x", "S3:bucket", "gs:b/x"])
def test_an_address_without_slashes_is_no_folder(given_: str) -> None:
    with pytest.raises(ConfigurationError, match="expected (s3|gs)://bucket/run; a folder of this name is given as ./"):
        as_place(given_, "output_dir")
    assert as_place(f"./{given_}", "output_dir") == Path(given_)


def test_files_of_profiles_that_cannot_be_read_matter_only_where_they_are_needed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config").write_text("[default]\nregion = a\n[default]\nregion = b\n")
    with pytest.raises(ConfigurationError, match="it is no file of profiles"):
        stores._profile("s3://bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert stores._profile("s3://bucket") == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL is empty"):
        Store("s3", "bucket")


def test_a_store_that_does_not_answer_is_not_one_without_a_manifest(server: ObjectServer) -> None:
    assert not has_manifest(ROOT)
    server.fault = lambda number, operation, key: "403"
    with pytest.raises(OSError, match="denies access"):
        has_manifest(ROOT)


def test_a_forked_process_is_told_that_it_cannot_use_a_store(server: ObjectServer) -> None:
    store_of(ROOT).put("k", b"x")
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_use, args=("bucket", answers))
    child.start()
    child.join()
    assert "was forked from one that has used an object store" in answers.get()


# objects from buffers


def sink(moved: list[int] | None = None, segment_mib: int = 1) -> ObjectSink:
    buffers = sized(Buffers(direct_io=False), segment_bytes=segment_mib << 20)
    return ObjectSink(ROOT / "attempt", (moved if moved is not None else []).append, buffers)


def test_memory_may_be_overwritten_as_soon_as_it_was_handed_over(server: ObjectServer) -> None:
    """The store answers late, and every piece comes in one buffer, which is garbage between two pieces."""
    server.fault = lambda number, operation, key: "late:0.05"
    moved: list[int] = []
    out, staging = sink(moved), np.zeros(300_000, np.uint8)
    sizes = [10, 300_000, 1_000_000, MIB, MIB + 1, 3 * MIB, 2 * MIB, 77, 900_000, MIB - 1]
    for number, size in enumerate(sizes):
        stream = out.open(f"x/{number}", size)
        for at in range(0, size, len(staging)):
            piece = staging[: min(len(staging), size - at)]
            piece[:] = (np.arange(at, at + len(piece)) * (number + 3)).astype(np.uint8)
            stream.append([memoryview(piece)])
            staging[:] = 0xEE
        stream.close(b"head" if number == 3 else b"")
    out.make_durable()
    for number, size in enumerate(sizes):
        expected = (np.arange(size) * (number + 3)).astype(np.uint8)
        if number == 3:
            expected[:4] = np.frombuffer(b"head", np.uint8)
        found = np.frombuffer(server.objects["bucket"][f"root/attempt/x/{number}"].data, np.uint8)
        assert np.array_equal(found, expected), number
    assert sum(moved) == sum(sizes)
    assert server.counts()["put"][:2] == (len(sizes), sum(sizes))


def test_a_put_that_fails_is_raised_by_a_later_call_and_nothing_hangs(server: ObjectServer) -> None:
    server.fault = lambda number, operation, key: "403" if "x/2" in key else None
    out = sink()
    with pytest.raises(PermissionError, match="denies access"):
        for number in range(100):
            out.write(f"x/{number}", [memoryview(bytes(700_000))], 700_000)
        out.flush()
    out.abort()


def test_more_objects_may_be_open_at_a_time_than_there_are_buffers(server: ObjectServer) -> None:
    out = sink()
    streams = [out.open(f"x/{number}", 700_000) for number in range(12)]
    for _ in range(7):
        for number, stream in enumerate(streams):
            stream.append([memoryview(bytes([number]) * 100_000)])
    for stream in streams:
        stream.close()
    out.make_durable()
    assert all(server.objects["bucket"][f"root/attempt/x/{number}"].data == bytes([number]) * 700_000 for number in range(12))


def test_what_is_in_flight_is_bounded_also_where_objects_are_small(server: ObjectServer) -> None:
    server.fault = lambda number, operation, key: "late:0.02"
    out = sink()
    most = 0
    for number in range(40):
        out.write(f"x/{number}", [memoryview(bytes(200_000))], 200_000)
        most = max(most, out._small_bytes)
    out.make_durable()
    assert 400_000 <= most <= MIB and len(server.objects["bucket"]) == 40


def test_an_object_of_its_own_length_waits_for_none_that_holds_a_buffer(server: ObjectServer) -> None:
    """All buffers are with open objects, and small ones are in flight: another buffer is made, and nothing waits for ever."""
    server.fault = lambda number, operation, key: "late:0.2"
    out = sink(segment_mib=2)
    streams = [out.open(f"x/{number}", 2 * MIB) for number in range(NUM_THREADS + 1)]
    out.write("small", [memoryview(b"x")], 1)
    streams.append(out.open("x/more", 2 * MIB))
    out.write("long", [memoryview(bytes(5 * MIB))], 5 * MIB)
    for stream in streams:
        stream.append([memoryview(bytes(2 * MIB))])
        stream.close()
    out.make_durable()
    assert len(server.objects["bucket"]) == NUM_THREADS + 4


def test_a_sink_that_is_aborted_leaves_no_put_in_flight(server: ObjectServer) -> None:
    server.fault = lambda number, operation, key: "late:0.02"
    out = sink()
    for number in range(10):
        out.write(f"x/{number}", [memoryview(bytes(600_000))], 600_000)
    out.abort()
    count = len(server.requests)
    assert count <= 10 and len(server.objects["bucket"]) == count


def test_objects_of_another_place_are_copied_by_the_store(server: ObjectServer) -> None:
    store_of(ROOT).put("root/old/a/b", bytes(range(100)))
    server.forget()
    out = sink()
    assert out.link("a/b", ROOT / "old", 100)
    assert not out.link("a/b", ROOT / "old", 99)
    assert not out.link("a/c", ROOT / "old", 100)
    assert not out.link("a/b", Path("/old"), 100)
    assert server.objects["bucket"]["root/attempt/a/b"].data == bytes(range(100))
    assert sum(up for _, up, _ in server.counts().values()) == 0
    out.unlink("a/b")
    assert "root/attempt/a/b" not in server.objects["bucket"]


def test_files_of_objects_are_read_in_part_and_whole(server: ObjectServer) -> None:
    data = np.arange(20 * MIB // 4, dtype=np.uint32).tobytes()
    store_of(ROOT).put("root/f", data)
    with ObjectFiles(ROOT) as files, files.opened("f") as file:
        assert file.size == files.size("f") == len(data)
        out = memoryview(bytearray(len(data)))
        at = 0
        while count := file.read_at([out[at : at + 1000], out[at + 1000 :]], at):
            at += count
        assert at == len(data) and out == data
        assert files.first_bytes("f", 10) == data[:10]
        assert list(files.below()) == ["f"] and files.sizes() == [len(data)]
        with pytest.raises(FileNotFoundError):
            files.size("g")
        for bad in ("../f", "/f", ""):
            with pytest.raises(ValueError, match="is not a path inside of"):
                files.read(bad, 10)
