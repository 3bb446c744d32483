"""Who the client is: only proxies of ours are believed, and only from the right end."""

import pytest

from tidemill.runtime.errors import FailedPrecondition
from tidemill.security.addresses import Proxies, allowance_name, peer_address

OURS = "10.0.0.0/8, ::1"


@pytest.mark.parametrize(
    ("listed", "peer", "forwarded", "client"),
    [
        ("", "10.0.0.1", "1.2.3.4", "10.0.0.1"),
        (OURS, "10.0.0.1", "1.2.3.4", "1.2.3.4"),
        (OURS, "9.9.9.9", "1.2.3.4", "9.9.9.9"),
        (OURS, "10.0.0.1", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        (OURS, "10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.7", "1.2.3.4"),
        (OURS, "10.0.0.1", "10.0.0.9,10.0.0.8", "10.0.0.9"),
        (OURS, "10.0.0.1", "1.2.3.4, nonsense", "10.0.0.1"),
        (OURS, "10.0.0.1", "", "10.0.0.1"),
        (OURS, "::1", "2001:db8::5", "2001:db8::5"),
        (OURS, "10.0.0.1", "1.2.3.4:5678", "1.2.3.4"),
        (OURS, "10.0.0.1", "6.6.6.6, [2001:db8::5]:443, 10.0.0.7:80", "2001:db8::5"),
        (OURS, "10.0.0.1", "[2001:db8::5]", "2001:db8::5"),
        (OURS, "10.0.0.1", "1.2.3.4, [nonsense:80", "10.0.0.1"),
        (OURS, "::ffff:10.0.0.1", "1.2.3.4", "1.2.3.4"),
        (OURS, "unix", "1.2.3.4", "unix"),
    ],
)
def test_the_nearest_address_that_is_not_ours(
    listed: str, peer: str, forwarded: str, client: str
) -> None:
    assert Proxies(listed).client(peer, forwarded) == client


def test_a_wrong_network_is_named() -> None:
    with pytest.raises(FailedPrecondition, match=r"--trusted-proxies: .*10\.0\.0\.1/8"):
        Proxies("10.0.0.1/8")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[2001:db8::1]:5000", "2001:db8::1"),
        ("unix:", "unix"),
        ("", "unix"),
    ],
)
def test_peers_of_grpc(peer: str, address: str) -> None:
    assert peer_address(peer) == address


def test_one_network_of_ipv6_is_one_client() -> None:
    """Who has one address of IPv6 has 2^64 of them."""
    assert allowance_name("2001:db8::1") == allowance_name("2001:db8::ffff:1")
    assert allowance_name("2001:db8::1") != allowance_name("2001:db8:0:1::1")
    assert allowance_name("::ffff:1.2.3.4") == "1.2.3.4"
    assert allowance_name("1.2.3.4") == "1.2.3.4"
    assert allowance_name("unix") == "unix"
