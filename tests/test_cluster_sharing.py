"""Replicas fetch prefixes from each other with the cluster's key, at addresses of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_blocks import NAMESPACE, save_all
from serving import short_folder
from tcp_server import tcp_server

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store.address import parse_address
from localgen.backends.kv_store.opening import open_prefix_store
from localgen.backends.kv_store.store import PEER, PrefixStore
from localgen.backends.model_info import KVShare, LoadOptions, ModelLoadRequest
from localgen.server.requests.caller import AGE_HEADER, GATEWAY_HEADER

TOKENS = list(range(300))


def opened(folder: Path, share: KVShare, namespace: bytes = NAMESPACE) -> PrefixStore:
    """The store of a replica with a state folder, and so a key, of its own."""
    request = ModelLoadRequest("m", "m.gguf", LoadOptions(), kv_dir=str(folder), kv_share=share)
    store, _ = open_prefix_store(request, namespace, ram_bytes=1 << 20, disk_bytes=0, about={})
    assert store is not None
    return store


@pytest.mark.parametrize("over", ["TCP", "a Unix socket"])
@pytest.mark.parametrize("other_key", [False, True])
def test_the_key_is_that_of_the_cluster(tmp_path: Path, over: str, other_key: bool) -> None:
    with short_folder() as folder:
        listen = "127.0.0.1:0" if over == "TCP" else f"{folder}/"
        one = opened(tmp_path / "one", KVShare(listen, b"k" * 32))
        two = opened(
            tmp_path / "two", KVShare("127.0.0.1:0", b"x" * 32 if other_key else b"k" * 32)
        )
        save_all(one, TOKENS)
        assert one.address is not None
        assert not one.address.endswith(":0")
        found = two.find(TOKENS, "", peer=two.peer(one.address))
        if other_key:
            assert found == []
        else:
            assert [(each.start, each.length) for each in found] == [
                (0, 128),
                (128, 128),
                (256, 44),
            ]
            loaded = two.load(found[0], TOKENS)
            assert loaded is not None
            assert loaded[1] == PEER
        one.close(0.0)
        two.close(0.0)


def test_each_model_of_a_replica_has_an_address(tmp_path: Path) -> None:
    with short_folder() as folder:
        share = KVShare(f"{folder}/", b"k" * 32)
        # the last one has the files of the second under another name
        stores = [opened(tmp_path, share, bytes([n]) * 16) for n in (1, 2, 2)]
        assert len({each.address for each in stores}) == 3
        for each in stores:
            each.close(0.0)


def test_any_port_is_for_those_that_listen() -> None:
    assert parse_address("10.0.0.1:0", "kv_listen") == ("10.0.0.1", 0)
    with pytest.raises(InvalidRequest, match="--kv-peer is"):
        parse_address("10.0.0.1:0", "kv_peer")


def test_the_time_to_the_first_token_begins_at_the_gateway() -> None:
    with tcp_server(gateway_secret="secret") as server:

        def ttft_ms(**headers: str) -> float:
            return float(server.chat(**headers).json()["timings"]["ttft_ms"])

        assert ttft_ms(**{GATEWAY_HEADER: "secret", AGE_HEADER: "60000"}) > 60_000
        assert ttft_ms(**{AGE_HEADER: "60000"}) < 60_000, "without the secret it is not obeyed"
