"""Blocks from another engine: only with the key, only whole ones, and without long waits."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, block_of, chain, load_all, save_all
from serving import wait_until
from tcp_server import free_port

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store import address as addresses
from localgen.backends.kv_store import block_file
from localgen.backends.kv_store import peer as peers
from localgen.backends.kv_store.address import Address, Connector, listen, parse_address
from localgen.backends.kv_store.block_file import BlockRefused, parse_block
from localgen.backends.kv_store.blocks import BLOCK_TOKENS
from localgen.backends.kv_store.peer import KVPeer
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.messages import FrameSocket, encode_frame

KEY = bytes(range(32))
TEXT = [3 * number % 1000 for number in range(4 * BLOCK_TOKENS + 50)]


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return str(tmp_path / "kv.sock") if request.param == "unix" else ("127.0.0.1", free_port())


@pytest.fixture
def source(address: Address) -> Iterator[PrefixStore]:
    """An engine's store that has a prompt and listens."""
    store = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    store.listen(address, KEY)
    save_all(store, TEXT)
    yield store
    store.close(0.0)


def asking(
    address: Address, key: bytes = KEY, namespace: bytes = NAMESPACE, ram: int = 0
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
def test_blocks_come_from_the_peer(address: Address) -> None:
    store = asking(address, ram=1 << 20)
    assert fetched(store) == len(TEXT)
    assert error_of(store) == ""
    assert load_all(store, TEXT) == len(TEXT), "they are kept"
    assert fetched(store, [*TEXT[:300], 5, *TEXT[301:]]) == 300
    assert fetched(asking(address), TEXT[::-1]) == 0
    store.close(0.0)


@pytest.mark.usefixtures("source")
def test_a_prompt_that_parts_within_a_block_gets_its_beginning(
    address: Address,
) -> None:
    store = asking(address)
    for shared in (BLOCK_TOKENS + 5, 4 * BLOCK_TOKENS + 30):
        assert fetched(store, [*TEXT[:shared], 10**6, *TEXT[shared:]]) == shared
    assert fetched(store, TEXT[:200]) == 200
    store.close(0.0)


@pytest.mark.usefixtures("source")
def test_without_the_key_there_is_nothing(address: Address) -> None:
    store = asking(address, key=bytes(32))
    assert fetched(store) == 0
    assert error_of(store).startswith("it has another key: both need the same kv/key")
    assert fetched(asking(address)) == len(TEXT), "others are still served"


def test_a_server_without_the_key_is_not_believed(address: Address) -> None:
    other = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    other.listen(address, bytes(32))
    save_all(other, TEXT)
    assert fetched(asking(address)) == 0
    other.close(0.0)


@pytest.mark.parametrize(
    ("namespace", "why"),
    [
        (NAMESPACE[:8] + bytes(4) + NAMESPACE[12:], "another model, or other files of it"),
        (NAMESPACE[:12] + bytes(4), "another build of the engine"),
        (bytes(16), "another model, or other files of it and another build of the engine"),
        (bytes(8) + NAMESPACE[8:], "another KV cache type, context or device"),
    ],
)
@pytest.mark.usefixtures("source")
def test_what_another_engine_differs_in_is_said_once(
    address: Address,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    namespace: bytes,
    why: str,
) -> None:
    monkeypatch.setattr(peers, "RETRY_S", 0.0)
    store = asking(address, namespace=namespace)
    for _ in range(3):
        assert fetched(store) == 0
    assert error_of(store) == f"it has {why}"
    (line,) = [each.getMessage() for each in caplog.records if "gives no blocks" in each.message]
    assert line.endswith(f"gives no blocks: it has {why}")
    assert addresses.address_text(address) in line
    store.close(0.0)


def test_another_version_is_said(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)
    monkeypatch.setattr(peers.PeerServer, "_answer", lambda *_: [])
    store = asking(address)
    assert fetched(store) == 0
    assert error_of(store) == "it has another version of localgen"
    source.close(0.0)


def test_a_peer_that_ends_and_comes_back(
    address: Address, source: PrefixStore, monkeypatch: pytest.MonkeyPatch
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
    address: Address, source: PrefixStore, monkeypatch: pytest.MonkeyPatch
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
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_IDLE_S", 0.2)
    monkeypatch.setattr(peers, "RETRY_S", 0.0)
    idle = [asking(address) for _ in range(peers.MAX_PEERS)]
    assert [fetched(store) for store in idle] == [len(TEXT)] * len(idle)
    last = asking(address)
    wait_until(lambda: fetched(last) == len(TEXT))


def test_the_service_outlives_a_lack_of_descriptors(
    address: Address, monkeypatch: pytest.MonkeyPatch
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
    address: Address, monkeypatch: pytest.MonkeyPatch
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


def test_one_that_hangs_costs_little(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CONNECT_S", 0.05)
    with listen(address):
        store = asking(address)
        assert fetched(store) == 0
        assert "timed out" in error_of(store)


def test_a_damaged_block_is_refused(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
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
    address: Address, monkeypatch: pytest.MonkeyPatch
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


def test_odd_requests_of_one_with_the_key(address: Address, source: PrefixStore) -> None:
    client = KVPeer(address, NAMESPACE, KEY)
    for digests in ([], [b""], [b"x"], [bytes(16)] * 3):
        assert client._ask(b"=", *digests) == b""
    for kind in (b"!", b""):
        assert client._ask(kind, bytes(16)) == b""
    assert client.num_held([]) == 0
    assert client.children(bytes(16)) == []
    for digests in ([], [b"x"], [bytes(16)] * 2):
        assert client._ask(b">", *digests) == b""
    digests = [each.digest for each in source.find(TEXT, "")[:4]]
    assert client.num_held([*digests, bytes(16), *digests]) == 4
    client.close()


def test_several_fetch_at_once(address: Address, source: PrefixStore) -> None:
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
    listener = listen(path)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="in use"):
        listen(path)
    listener.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen(str(tmp_path / "file"))


@pytest.mark.parametrize("text", ["", "7000", ":7000", "host:", "host:0", "host:70000", "host:1x"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--kv-peer is .* give HOST:PORT"):
        parse_address(text, "kv_peer")


def test_addresses() -> None:
    assert parse_address("localhost:7000", "kv_peer") == ("localhost", 7000)
    assert parse_address("[::1]:7000", "kv_peer") == ("::1", 7000)
    assert parse_address("./kv.sock", "kv_peer") == "./kv.sock"


def test_a_slow_peer_is_given_up(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_REPLY_S", 0.1)
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)

    answer = peers.PeerServer._answer

    def slow(server: peers.PeerServer, request: bytes) -> Iterator[bytes | memoryview[int]]:
        if request != peers._NAMESPACE:
            time.sleep(0.5)
        yield from answer(server, request)

    monkeypatch.setattr(peers.PeerServer, "_answer", slow)
    store = asking(address)
    assert fetched(store) == 0
    assert "timed out" in error_of(store)
    source.close(0.0)


@pytest.mark.parametrize("is_fast_enough", [True, False])
def test_a_large_block_may_take_longer(
    address: Address, monkeypatch: pytest.MonkeyPatch, is_fast_enough: bool
) -> None:
    """Twenty pieces in 0.6 s, where a short reply has 0.2 s."""
    monkeypatch.setattr(peers, "_REPLY_S", 0.2)
    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)
    save_all(source, TEXT)
    size = block_file.file_size(next(chain(TEXT)))
    monkeypatch.setattr(peers, "_MIN_BYTES_PER_S", size / (30.0 if is_fast_enough else 0.01))
    send = FrameSocket.send

    def in_pieces(peer: FrameSocket, content: bytes, deadline_s: float | None = None) -> None:
        if len(content) < size // 2:
            send(peer, content, deadline_s)
            return
        frame = encode_frame(content)
        step = len(frame) // 20 + 1
        with contextlib.suppress(OSError):  # it was given up
            for at in range(0, len(frame), step):
                peer.sock.sendall(frame[at : at + step])
                time.sleep(0.03)

    monkeypatch.setattr(FrameSocket, "send", in_pieces)
    store = asking(address)
    assert fetched(store, TEXT[:BLOCK_TOKENS]) == (BLOCK_TOKENS if is_fast_enough else 0)
    assert error_of(store) == ("" if is_fast_enough else "timed out")
    source.close(0.0)


def test_a_lack_of_threads_costs_no_permit(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_PAUSE_S", 0.0)
    monkeypatch.setattr(peers, "RETRY_S", 0.0)
    start, failed = threading.Thread.start, list[int]()

    def scarce(thread: threading.Thread) -> None:
        if "_serve" in thread.name and len(failed) < peers.MAX_PEERS + 1:
            failed.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    source = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    source.listen(address, KEY)
    save_all(source, TEXT)
    monkeypatch.setattr(threading.Thread, "start", scarce)
    store = asking(address)
    while len(failed) < peers.MAX_PEERS + 1:
        fetched(store)
    assert fetched(store) == len(TEXT)
    source.close(0.0)


def test_a_name_that_takes_long_to_look_up_serves_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up, answered, calls = socket.getaddrinfo, threading.Event(), list[object]()

    def slow(*asked: object, **more: object) -> object:
        calls.append(asked)
        answered.wait(30)
        return look_up("127.0.0.1", *asked[1:], **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connector = Connector(("other.example", listener.getsockname()[1]))
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"timed out looking up other\.example"):
                connector.connect(time.monotonic() + 0.05)
        answered.set()
        connector.connect(time.monotonic() + 30).close()
        assert len(calls) == 1, "not a thread for each try"
        connector.connect(time.monotonic() + 30).close()
        assert len(calls) == 2, "it may have moved"


def test_a_name_that_is_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    store = asking(("other.example", 7000))
    assert fetched(store) == 0
    assert error_of(store) == "Name or service not known"


def test_all_addresses_of_a_host_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    class Silent(socket.socket):
        def connect(self, _: object) -> None:
            limits.append(self.gettimeout())
            raise TimeoutError("timed out")

    targets = [(socket.AF_INET, 1, 6, "", (f"192.0.2.{number}", 7000)) for number in range(4)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: targets)
    monkeypatch.setattr(socket, "socket", Silent)
    with pytest.raises(TimeoutError):
        Connector(("other.example", 7000)).connect(time.monotonic() + 4.0)
    assert len(limits) == len(targets)
    assert limits[0] is not None
    assert 0 < limits[0] <= 1.0
