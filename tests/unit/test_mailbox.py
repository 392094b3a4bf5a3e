"""Values of any size in a store that takes at most 8 MiB a value, and not a key left behind."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from ckpt.mailbox import Mailbox, StoreGoneError

SIZES = [0, 1, 64 << 10, (64 << 10) + 1, 4 << 20, (4 << 20) + 1, 9 << 20]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compress", [True, False])
def test_bytes_of_any_size_arrive_as_they_were_and_leave_no_key(
    store: dist.TCPStore, size: int, compress: bool
) -> None:
    data = random.Random(size).randbytes(size)  # does not compress, so the pieces are really needed
    before = store.num_keys()
    writer, reader = Mailbox(store, writer=0), Mailbox(store, writer=1)
    writer.put("key", data, compress=compress)
    assert reader.take(["key", "key"]) == [data, data]
    assert reader.peek("key") == data
    reader.delete("key")
    assert store.num_keys() == before


@pytest.mark.full
def test_a_table_of_many_megabytes_is_compressed(store: dist.TCPStore) -> None:
    data = b'["h.0.attn.weight", [2304, 768], "float32"],' * 200_000
    Mailbox(store, writer=0).put("key", data)
    assert len(store.get("key")) < len(data) / 20
    assert Mailbox(store, writer=1).peek("key") == data


def test_values_that_look_like_ours_are_not_taken_for_them(store: dist.TCPStore) -> None:
    mailbox = Mailbox(store, writer=0)
    for data in (b"", b"?", b"z", b"s[]", b"=", b"\x00\xff"):
        mailbox.put("key", data)
        assert mailbox.peek("key") == data


@pytest.mark.parametrize("size", [3, 9 << 20])
def test_the_first_to_put_wins_and_the_second_reads_it_and_leaves_nothing(store: dist.TCPStore, size: int) -> None:
    first, second = (random.Random(seed).randbytes(size) for seed in (1, 2))
    mailboxes = [Mailbox(store, writer=rank) for rank in (0, 1)]
    before = store.num_keys()
    assert mailboxes[0].put_first("key", first) == first
    keys = store.num_keys()
    assert mailboxes[1].put_first("key", second) == first
    assert store.num_keys() == keys
    mailboxes[1].delete("key")
    assert store.num_keys() == before


def test_looking_for_what_is_not_there_neither_waits_nor_leaves_a_key(store: dist.TCPStore) -> None:
    mailbox, before = Mailbox(store, writer=0), store.num_keys()
    assert mailbox.peek("key") is None
    assert not mailbox.has(["key"])
    mailbox.delete("key")
    assert store.num_keys() == before


def test_a_store_that_has_gone_is_one_error_of_ours_whatever_is_asked() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mailbox = Mailbox(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), writer=0)
    del server
    for ask in (lambda: mailbox.peek("key"), lambda: mailbox.has(["key"]), lambda: mailbox.take(["key"])):
        with pytest.raises(StoreGoneError):
            ask()
