"""Values of any size in a store that takes at most 8 MiB a value, and not a key left behind."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.errors import ConfigurationError
from ckpt.ranks import stores
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError, connection, reach, serve
from tests.support.covering import sampled
from tests.support.frozen import Frozen

SIZES = [0, 1, 64 << 10, (64 << 10) + 1, 4 << 20, (4 << 20) + 1, 9 << 20]


@pytest.fixture
def store() -> dist.TCPStore:
    return serve(LOOPBACK, timeout_s=300.0)


@pytest.mark.parametrize("size", SIZES)
@sampled("compress", [True, False])
def test_bytes_of_any_size_arrive_as_they_were_and_leave_no_key(
    store: dist.TCPStore, size: int, compress: bool
) -> None:
    data = random.Random(size).randbytes(size)  # does not compress, so the pieces are really needed
    before = store.num_keys()
    writer, reader = StoreClient(store, writer=0), StoreClient(store, writer=1)
    writer.put("key", data, compress=compress)
    assert reader.take(["key", "key"]) == [data, data]
    assert reader.peek("key") == data
    reader.delete("key")
    assert store.num_keys() == before


@pytest.mark.full
def test_a_table_of_many_megabytes_is_compressed(store: dist.TCPStore) -> None:
    data = b'["h.0.attn.weight", [2304, 768], "float32"],' * 200_000
    StoreClient(store, writer=0).put("key", data)
    assert len(store.get("key")) < len(data) / 20
    assert StoreClient(store, writer=1).peek("key") == data


def test_values_that_look_like_ours_are_not_taken_for_them(store: dist.TCPStore) -> None:
    client = StoreClient(store, writer=0)
    for data in (b"", b"?", b"z", b"s[]", b"=", b"\x00\xff"):
        client.put("key", data)
        assert client.peek("key") == data


@pytest.mark.parametrize("size", [3, 9 << 20])
def test_the_first_to_put_wins_and_the_second_reads_it_and_leaves_nothing(store: dist.TCPStore, size: int) -> None:
    first, second = (random.Random(seed).randbytes(size) for seed in (1, 2))
    clients = [StoreClient(store, writer=rank) for rank in (0, 1)]
    before = store.num_keys()
    assert clients[0].put_first("key", first) == first
    keys = store.num_keys()
    assert clients[1].put_first("key", second) == first
    assert store.num_keys() == keys
    clients[1].delete("key")
    assert store.num_keys() == before


def test_looking_for_what_is_not_there_neither_waits_nor_leaves_a_key(store: dist.TCPStore) -> None:
    client, before = StoreClient(store, writer=0), store.num_keys()
    assert client.peek("key") is None
    assert not client.has(["key"])
    client.delete("key")
    assert store.num_keys() == before


def test_a_store_that_has_gone_is_one_error_of_ours_whatever_is_asked() -> None:
    server = serve(LOOPBACK, timeout_s=300.0)
    client = StoreClient(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), writer=0)
    del server
    for ask in (lambda: client.peek("key"), lambda: client.has(["key"]), lambda: client.take(["key"])):
        with pytest.raises(StoreGoneError):
            ask()


# A store whose process is there and does not answer

CALLS: dict[str, Callable[[StoreClient], object]] = {
    "set": lambda client: [client.put("key", b"x" * (4 << 20), compress=False) for _ in range(16)],
    "compare_set": lambda client: client.peek("key"),
    "check": lambda client: client.has(["key"]),
    "multi_get": lambda client: client.take(["key"]),
    "add": lambda client: client.add("count", 1),
    "delete_key": lambda client: client.delete("key"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_to_a_store_that_hangs_ends_and_says_which_store_and_which_call(
    store: dist.TCPStore, call: str
) -> None:
    with Frozen(store.port) as between:
        client = StoreClient(reach("127.0.0.1", between.port, timeout_s=5.0), writer=1, timeout_s=0.2)
        client.put("key", b"value")
        assert client.peek("key") == b"value"
        between.freeze()
        began = time.monotonic()
        where = re.escape(f"127.0.0.1:{between.port}")
        with pytest.raises(StoreGoneError, match=f"^the store at {where} did not answer {call} within 0.2 s$"):
            CALLS[call](client)
        assert time.monotonic() - began < 2.0
        between.thaw()
        with pytest.raises(StoreGoneError, match=call):  # a late answer is not taken for one to the next call
            client.peek("key")


def test_a_connection_to_a_store_that_hangs_ends(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CONNECT_S", 0.2)
    with Frozen(store.port) as between:
        base = reach("127.0.0.1", between.port, timeout_s=5.0)
        between.freeze()
        for connect in (
            lambda: StoreClient(base, writer=0, timeout_s=0.2),
            lambda: connection(dist.PrefixStore("part", base), 0.2),
            lambda: reach("127.0.0.1", between.port, timeout_s=0.2),
        ):
            with pytest.raises(StoreGoneError, match="did not answer a new connection within 0.2 s"):
                connect()


def test_a_store_listens_on_one_address() -> None:
    held = serve("127.0.0.2", timeout_s=5.0)
    held.set("key", "value")
    assert reach("127.0.0.2", held.port, timeout_s=5.0).get("key") == b"value"
    with pytest.raises(StoreGoneError):
        reach("127.0.0.1", held.port, timeout_s=0.2)
    with pytest.raises(OSError):
        serve("192.0.2.77", timeout_s=5.0)  # an address for documentation, no machine's


def test_sockets_that_other_threads_make_beside_a_new_connection_are_left_alone(store: dist.TCPStore) -> None:
    """Which socket is the connection's is found by what is new; the peer of a Unix socket has no port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = listener.getsockname()
        pair = stores._connected(socket.socketpair, store.port, "here", 5.0)
        elsewhere = stores._connected(lambda: socket.create_connection(other), store.port, "here", 5.0)
        for one in (*pair, elsewhere):
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
            one.close()


# Queues


@sampled("kind", ["tcp", "tcp without libuv", "hash", "file"], 2)
def test_messages_of_any_size_come_in_their_order_and_leave_no_key(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, Callable[[], dist.Store]] = {
        "tcp": lambda: serve(LOOPBACK, timeout_s=300.0),
        "tcp without libuv": lambda: dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, use_libuv=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
    }
    store = kinds[kind]()
    writer, reader = StoreClient(store, writer=1), StoreClient(store, writer=0)
    sent = [b"", b"a", random.Random(1).randbytes(9 << 20), b"stop", *(b"%d" % number for number in range(20))]
    for data in sent:
        writer.push("inbox", data)
    got = [reader.pop("inbox") for _ in range(4)]
    while len(got) < len(sent):
        got += reader.pop_waiting("inbox") or [reader.pop("inbox")]
    assert got == sent
    assert reader.num_waiting("inbox") == 0 and reader.pop_waiting("inbox") == []
    if kind == "file":  # which never forgets a key
        size = (tmp_path / "store").stat().st_size
        assert reader.pop("inbox") is None and (tmp_path / "store").stat().st_size == size, "to wait writes nothing"
    else:
        assert store.num_keys() <= 1, "but for the number of the messages, of a store without queues"


def test_a_rank_that_was_killed_between_the_number_and_the_message_holds_up_no_others() -> None:
    store = dist.HashStore()
    first, second, reader = (StoreClient(store, writer=rank) for rank in (1, 2, 0))
    numbers = [first.add("inbox/number", 1), first.add("inbox/number", 1)]  # of which one rank is slow, and the other is gone
    for data in (b"a", b"b"):
        second.push("inbox", data)
    assert [reader.pop("inbox") for _ in range(2)] == [b"a", b"b"]
    assert reader.pop("inbox") is None
    first.put(f"inbox/{numbers[1]}", b"late")
    second.push("inbox", b"c")
    assert [reader.pop("inbox") for _ in range(2)] == [b"late", b"c"]


def test_parts_of_a_store_share_a_connection_and_its_end() -> None:
    server = serve(LOOPBACK, timeout_s=300.0)
    with Frozen(server.port) as between:
        client = StoreClient(reach(LOOPBACK, between.port, timeout_s=5.0), writer=1, timeout_s=2.0)
        part = client.part("a").part("b")
        part.put("key", b"1")
        assert server.get("a/b/key") == b"=1" and client.peek("key") is None
        between.freeze()
        for one in (part, client):
            with pytest.raises(StoreGoneError, match="did not answer compare_set within 2 s"):
                one.peek("key")


def test_the_holder_of_a_store_makes_room_for_the_connections_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 10_000)]
    monkeypatch.setattr(stores.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(stores.resource, "setrlimit", lambda _, both: limits.append(both))
    serve(LOOPBACK, timeout_s=1.0, for_ranks=64)
    assert limits == [(1024, 10_000)], "there is room already"
    serve(LOOPBACK, timeout_s=1.0, for_ranks=1000)
    assert limits[1:] == [(6256, 10_000)]
    refusal = "the store of 10240 ranks, whose connections need about 61696 open files, and may open 10000"
    with pytest.raises(ConfigurationError, match=refusal):
        serve(LOOPBACK, timeout_s=1.0, for_ranks=10_240)
