"""host:port strings, and who may listen where."""

import pytest

from specfleet.contracts.errors import ConfigError
from specfleet.rpc.address import Address, listen_address, parse_address


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("127.0.0.1:7070", Address("127.0.0.1", 7070), "127.0.0.1:7070"),
        (":0", Address("127.0.0.1", 0), "127.0.0.1:0"),
        ("[::1]:1", Address("::1", 1), "[::1]:1"),
        ("coordinator:65535", Address("coordinator", 65535), "coordinator:65535"),
    ],
)
def test_addresses(text: str, address: Address, shown: str) -> None:
    assert parse_address(text) == address
    assert str(address) == shown


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:-1", "host:65536", "::1:5", "a b:1", "http://h:1", "h:٣"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert caught.value.code == "SF-CONFIG-ADDRESS"


def test_only_loopback_listens_without_insecure() -> None:
    for text in ("127.0.0.1:0", "127.1.2.3:0", "localhost:0", "[::1]:0"):
        listen_address(text)
    for text in ("0.0.0.0:0", "[::]:0", "10.0.0.1:0", "coordinator:0"):
        with pytest.raises(ConfigError, match="--insecure") as caught:
            listen_address(text)
        assert caught.value.code == "SF-CONFIG-INSECURE-LISTEN"
        assert listen_address(text, insecure=True).port == 0
