"""Which address a request came from, where proxies stand in between.

It does not know HTTP or gRPC.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

from tidemill.runtime.errors import FailedPrecondition

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_V6_PREFIX = 64
_UNIX = "unix"


class Proxies:
    """The machines whose word on their callers is taken."""

    def __init__(self, listed: str) -> None:
        """Addresses and networks with commas between. Raises FailedPrecondition for others."""
        words = [word.strip() for word in listed.split(",") if word.strip()]
        try:
            self._networks: list[Network] = [ipaddress.ip_network(word) for word in words]
        except ValueError as failure:
            raise FailedPrecondition(
                f"--trusted-proxies: {failure}; list addresses and networks with commas between, "
                "for example 10.0.0.0/8,::1",
                reason="TRUSTED_PROXIES",
                param="trusted_proxies",
            ) from failure

    def client(self, peer: str, forwarded_for: str) -> str:
        """The nearest address that is not a proxy of ours.

        Each proxy adds its caller at the end of x-forwarded-for, so what stands ahead of an
        address that is not ours may be made up.
        """
        if not self._networks or not forwarded_for or not self._trusts(peer):
            return peer
        client = peer
        for word in reversed(forwarded_for.split(",")):
            address = _address(_without_port(word.strip()))
            if address is None:
                return client
            client = str(address)
            if not self._trusts(client):
                return client
        return client

    def _trusts(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(address in network for network in self._networks)


def peer_address(peer: str) -> str:
    """The address in what gRPC calls a peer: ipv4:127.0.0.1:50, ipv6:[::1]:50, unix:/path."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind or _UNIX
    return rest.rpartition(":")[0].strip("[]")


def allowance_name(address: str) -> str:
    """Whose allowance an address uses: a caller of IPv6 owns a whole network of them."""
    if ":" not in address:
        return address
    parsed = _address(address)
    if not isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed or address)
    return str(ipaddress.ip_network((parsed.packed, _V6_PREFIX), strict=False))


def _without_port(word: str) -> str:
    """The address of an entry: some gateways write their caller's port too, [::1]:50 of IPv6."""
    if word.startswith("["):
        return word[1:].partition("]")[0]
    return word.partition(":")[0] if word.count(":") == 1 else word


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
