"""Blocks from another engine: only with the key, only whole ones, and without long waits."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, block_of, load_all, save_all
from serving import wait_until
from tcp_server import free_port

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store import block_file
from localgen.backends.kv_store import peer as peers
from localgen.backends.kv_store.block_file import BlockRefused, parse_block
from localgen.backends.kv_store.blocks import BLOCK_TOKENS
from localgen.backends.kv_store.peer import KVPeer, parse_address
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.messages import FrameSocket

KEY = bytes(range(32))
TEXT = [3 * number % 1000 for number in range(4 * BLOCK_TOKENS + 50)]


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, int] | str:
    return str(tmp_path / "kv.sock") if request.param == "unix" else ("127.0.0.1", free_port())


@pytest.fixture
def source(address: tuple[str, int] | str) -> Iterator[PrefixStore]:
    """An engine's store that has a prompt and listens."""
    store = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    store.listen(address, KEY)
    save_all(store, TEXT)
    yield store
    store.close(0.0)


def asking(
    address: tuple[str, int] | str, key: bytes = KEY, namespace: bytes = NAMESPACE, ram: int = 0
) -> PrefixStore:
    """A store whose default peer is at the address, whatever it is called."""
    return PrefixStore(
        namespace,
        ram_bytes=ram,
        disk=None,
        connect=lambda _: KVPeer(address, namespace, key),
        default_peer="default",
    )


def fetched(store: PrefixStore, tokens: list[int] = TEXT) -> int:
    """Load a prompt as an engine does; returns the tokens loaded."""
    length = 0
    for found in store.find(tokens, "", peer=store.peer("")):
        loaded = store.load(found, tokens)
        if loaded is None:
            break
        length += found.length
    return length


def error_of(store: PrefixStore) -> str:
    return store.stats()[-1].error


@pytest.mark.usefixtures("source")
def test_blocks_come_from_the_peer(address: tuple[str, int] | str) -> None:
    store = asking(address, ram=1 << 20)
    assert fetched(store) == len(TEXT)
    assert error_of(store) == ""
    assert load_all(store, TEXT) == len(TEXT), "they are kept"
    assert fetched(store, [*TEXT[:300], 5, *TEXT[301:]]) == 300
    assert fetched(asking(address), TEXT[::-1]) == 0
    store.close(0.0)


@pytest.mark.usefixtures("source")
def test_a_prompt_that_parts_within_a_block_gets_its_beginning(
    address: tuple[str, int] | str,
) -> None:
    store = asking(address)
    for shared in (BLOCK_TOKENS + 5, 4 * BLOCK_TOKENS + 30):
        assert fetched(store, [*TEXT[:shared], 10**6, *TEXT[shared:]]) == shared
    assert fetched(store, TEXT[:200]) == 200
    store.close(0.0)


@pytest.mark.usefixtures("source")
def test_without_the_key_there_is_nothing(address: tuple[str, int] | str) -> None:
    store = asking(address, key=bytes(32))
    assert fetched(store) == 0
    assert error_of(store)
    assert fetched(asking(address)) == len(TEXT), "others are still served"


def test_a_server_without_the_key_is_not_believed(address: tuple[str, int] | str) -> None:
    other = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    other.listen(address, bytes(32))
    save_all(other, TEXT)
    assert fetched(asking(address)) == 0
    other.close(0.0)


@pytest.mark.usefixtures("source")
def test_another_model_gets_nothing(address: tuple[str, int] | str) -> None:
    assert fetched(asking(address, namespace=bytes(16))) == 0


def test_a_peer_that_ends_and_comes_back(
    address: tuple[str, int] | str, source: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = asking(address)
    assert fetched(store) == len(TEXT)
    source.close(0.0)
    store.close(0.0)
    assert fetched(store) == 0
    assert error_of(store)
    monkeypatch.setattr(peers, "RETRY_S", 0.0)
    store = asking(address)
    assert fetched(store) == 0
    again = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    again.listen(address, KEY)
    save_all(again, TEXT)
    assert fetched(store) == len(TEXT)
    assert error_of(store) == ""
    again.close(0.0)


def test_a_connection_that_was_dropped_is_opened_again(
    address: tuple[str, int] | str, source: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_IDLE_S", 0.05)
    store = asking(address)
    assert fetched(store) == len(TEXT)
    time.sleep(0.2)
    assert fetched(store) == len(TEXT)
    assert error_of(store) == ""
    assert source.is_shared


@pytest.mark.usefixtures("source")
def test_idle_clients_do_not_keep_others_out(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_IDLE_S", 0.2)
    monkeypatch.setattr(peers, "RETRY_S", 0.0)
    idle = [asking(address) for _ in range(peers.MAX_PEERS)]
    assert [fetched(store) for store in idle] == [len(TEXT)] * len(idle)
    last = asking(address)
    wait_until(lambda: fetched(last) == len(TEXT))


def test_the_service_outlives_a_lack_of_descriptors(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, list[int]()

    def scarce(sock: socket.socket) -> object:
        if not failed:
            failed.append(1)
            raise OSError(24, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)
    save_all(source, TEXT)
    assert fetched(asking(address)) == len(TEXT)
    assert failed
    source.close(0.0)
    assert not (isinstance(address, str) and Path(address).exists())


def test_one_that_failed_is_left_alone_for_a_while(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    store = asking(address)

    def refuse(_: KVPeer) -> FrameSocket:
        tried.append(1)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(KVPeer, "_connect", refuse)
    for _ in range(5):
        assert fetched(store) == 0
    assert len(tried) == 1
    assert error_of(store) == "Connection refused"


def test_one_that_hangs_costs_little(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_CONNECT_S", 0.05)
    with peers._listen(address):
        store = asking(address)
        assert fetched(store) == 0
        assert "timed out" in error_of(store)


def test_a_damaged_block_is_refused(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)
    save_all(source, TEXT)
    whole = block_file.block_parts

    def damaged(*given: object) -> Iterator[bytes]:
        content = bytearray(b"".join(whole(*given)))  # type: ignore[arg-type]
        content[len(content) // 2] ^= 1
        yield bytes(content)

    monkeypatch.setattr(block_file, "block_parts", damaged)
    store = asking(address)
    assert fetched(store) == 0
    assert "refused a block: it is damaged" in error_of(store)
    source.close(0.0)


def test_each_damage_of_a_block_is_noticed() -> None:
    block = block_of(bytes(16), TEXT[:BLOCK_TOKENS])
    content = b"".join(block_file.block_parts(NAMESPACE, block, KEY))
    assert (parse_block(content, NAMESPACE, KEY).state == block.state).all()
    chooser = random.Random(1)
    for at in [*range(70), *chooser.sample(range(len(content)), 100)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << chooser.randrange(8)
        with pytest.raises(BlockRefused):
            parse_block(bytes(damaged), NAMESPACE, KEY)
    for size in (0, 10, 70, len(content) - 1):
        with pytest.raises(BlockRefused):
            parse_block(content[:size], NAMESPACE, KEY)


@pytest.mark.usefixtures("source")
def test_garbage_and_many_connections_do_not_end_the_service(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        sock.connect(address)
        return sock

    for content in (b"", b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", (100).to_bytes(4, "little") * 30):
        with connect() as sock:
            sock.sendall(content)
    monkeypatch.setattr(peers, "_CONNECT_S", 0.2)
    silent = [connect() for _ in range(3 * peers.MAX_PEERS)]
    # those that prove nothing are ended
    wait_until(lambda: fetched(asking(address)) == len(TEXT))
    for sock in silent:
        sock.close()


def test_odd_requests_of_one_with_the_key(
    address: tuple[str, int] | str, source: PrefixStore
) -> None:
    client = KVPeer(address, NAMESPACE, KEY)
    for digests in ([], [b""], [b"x"], [bytes(16)] * 3):
        assert client._ask(b"=", *digests) == b""
    assert client._ask(b"!", bytes(16)) == b""
    assert client.num_held([]) == 0
    assert client.children(bytes(16)) == []
    for digests in ([], [b"x"], [bytes(16)] * 2):
        assert client._ask(b">", *digests) == b""
    digests = [each.digest for each in source.find(TEXT, "")[:4]]
    assert client.num_held([*digests, bytes(16), *digests]) == 4
    client.close()


def test_several_fetch_at_once(address: tuple[str, int] | str, source: PrefixStore) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(fetched(asking(address)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for number in range(200):  # the engine goes on
        save_all(source, [number] * BLOCK_TOKENS)
    for thread in threads:
        thread.join()
    assert got == [len(TEXT)] * 8


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    listener = peers._listen(path)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="in use"):
        peers._listen(path)
    listener.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        peers._listen(str(tmp_path / "file"))


@pytest.mark.parametrize("text", ["", "7000", ":7000", "host:", "host:0", "host:70000", "host:1x"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--kv-peer is .* give HOST:PORT"):
        parse_address(text, "kv_peer")


def test_addresses() -> None:
    assert parse_address("localhost:7000", "kv_peer") == ("localhost", 7000)
    assert parse_address("[::1]:7000", "kv_peer") == ("::1", 7000)
    assert parse_address("./kv.sock", "kv_peer") == "./kv.sock"


def test_a_slow_peer_is_given_up(
    address: tuple[str, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_REPLY_S", 0.1)
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)

    def slow(*_: object) -> Iterator[bytes]:
        time.sleep(0.5)
        yield b""

    monkeypatch.setattr(peers.PeerServer, "_answer", slow)
    store = asking(address)
    assert fetched(store) == 0
    assert "timed out" in error_of(store)
    source.close(0.0)
