"""Who is let in: the allowance of the address, then the key, then the key's allowance.

The address comes first, so that whoever guesses keys is slowed down; the key's own allowance can
only follow the key. It does not know HTTP or gRPC; both faces ask it, once for each request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from frontend.config import FrontendConfig
from tidemill.runtime.errors import InvalidRequest, Overloaded, Unauthenticated
from tidemill.security.addresses import Proxies, allowance_name
from tidemill.security.allowance import Allowance
from tidemill.security.keys import KeyRing

_BEARER = "bearer "
_RETRY_MIN_S = 0.001
_KEY_FLAGS = ("key_requests_per_minute", "key_tokens_per_minute")
_RATE_FLAGS = ("ip_requests_per_minute", "ip_tokens_per_minute", *_KEY_FLAGS)


def check_rates(config: FrontendConfig) -> None:
    """Raises InvalidRequest for a rate below 0, and for rates of keys where nobody shows one."""
    for name in _RATE_FLAGS:
        if getattr(config, name) < 0:
            raise InvalidRequest(
                f"{name} is {getattr(config, name)}; it must be at least 1, or 0 for no limit",
                param=name,
            )
    has_keys = config.api_key is not None or config.api_keys_file is not None
    of_keys = [name for name in _KEY_FLAGS if getattr(config, name)]
    if of_keys and not has_keys:
        raise InvalidRequest(
            f"{' and '.join(of_keys)} need keys: --api-keys-file or --api-key; without keys limit "
            "addresses, with --ip-requests-per-minute",
            param=of_keys[0],
        )


class RateLimited(Overloaded):
    """429: more than was allowed in this minute."""

    http_type: ClassVar[str] = "rate_limit_error"
    default_reason: ClassVar[str] = "RATE_LIMIT_EXCEEDED"

    def __init__(self, message: str, *, retry_after_ms: int, left: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.left = left
        """Headers that say what is left."""


class _Limits:
    """Requests and tokens per minute of one kind of name; None: unlimited."""

    def __init__(self, what: str, requests: int, tokens: int, clock: Callable[[], float]) -> None:
        self._what = what
        self._requests = Allowance(requests, clock) if requests else None
        self._tokens = Allowance(tokens, clock) if tokens else None

    def __bool__(self) -> bool:
        return self._requests is not None or self._tokens is not None

    def enter(self, name: str) -> None:
        """Takes one request. Raises as `check` does."""
        self.check(name)
        if self._requests is not None:
            self._requests.take(name, 1)

    def check(self, name: str) -> None:
        """Raises RateLimited where there is no request left, or tokens are owed."""
        for allowance, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if allowance is not None and (wait_s := allowance.wait_s(name)):
                raise RateLimited(
                    f"rate limit reached: {self._what} may use {allowance.per_minute} {unit} per "
                    f"minute; try again in {max(wait_s, _RETRY_MIN_S):.3g} s",
                    retry_after_ms=max(1, math.ceil(1000 * wait_s)),
                    left=self.headers(name),
                )

    def use(self, name: str, num_tokens: int) -> None:
        """Takes tokens that were used already."""
        if self._tokens is not None:
            self._tokens.take(name, num_tokens)

    def headers(self, name: str) -> dict[str, str]:
        """What is left, in the words of OpenAI's API."""
        found = {}
        for allowance, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if allowance is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(allowance.per_minute)
                found[f"x-ratelimit-remaining-{unit}"] = str(allowance.left(name))
                found[f"x-ratelimit-reset-{unit}"] = f"{allowance.reset_s(name):.3f}s"
        return found


class Admitted(NamedTuple):
    """Somebody who was let in."""

    caller: str
    """Name of the key; empty where none is asked for."""
    use: Callable[[int], None] | None
    """Takes tokens from the allowances, where there are any."""
    left: Mapping[str, str]
    """Headers that say what is left of the narrowest allowance that is known."""


class Gate:
    """Made once for a frontend; used by one event loop."""

    def __init__(self, config: FrontendConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises FailedPrecondition for files and InvalidRequest for limits that do not serve."""
        check_rates(config)
        self._keys = KeyRing(config.api_keys_file, config.api_key)
        self._proxies = Proxies(config.trusted_proxies)
        self._of_address = _Limits(
            "this address", config.ip_requests_per_minute, config.ip_tokens_per_minute, clock
        )
        self._of_key = _Limits(
            "this key", config.key_requests_per_minute, config.key_tokens_per_minute, clock
        )

    @property
    def is_open(self) -> bool:
        """Nothing is asked of anybody."""
        return self._keys.is_empty and not self._of_address

    def client(self, peer: str, forwarded_for: str) -> str:
        """The address of the client behind our own proxies."""
        return self._proxies.client(peer, forwarded_for)

    def admit(self, client: str, authorization: str, api_key: str) -> Admitted:
        """Lets a request in. Raises RateLimited or Unauthenticated."""
        address = allowance_name(client) if self._of_address else ""
        if self._of_address:
            self._of_address.enter(address)
        caller = "" if self._keys.is_empty else self._name(authorization, api_key)
        if self._of_key:
            self._of_key.enter(caller)
        left = self._of_key.headers(caller) or self._of_address.headers(address)

        def use(num_tokens: int) -> None:
            self._of_address.use(address, num_tokens)
            self._of_key.use(caller, num_tokens)

        return Admitted(caller, use if left else None, left)

    def knows(self, client: str, authorization: str, api_key: str) -> bool:
        """Whether somebody would be let in who asks for nothing but to be recognised.

        A wrong key costs a request, and where the address has none left no key is looked at: here
        too, whoever guesses keys is slowed down. Who shows none, or the right one, pays nothing.
        """
        if self._keys.is_empty:
            return True
        if not _shown(authorization, api_key):
            return False
        address = allowance_name(client) if self._of_address else ""
        try:
            self._of_address.check(address)
            return bool(self._name(authorization, api_key))
        except RateLimited:
            return False
        except Unauthenticated:
            self._of_address.enter(address)
            return False

    def _name(self, authorization: str, api_key: str) -> str:
        shown = _shown(authorization, api_key)
        if not shown:
            raise Unauthenticated(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY', or as "
                "'x-api-key: KEY'",
                reason="MISSING_API_KEY",
            )
        name = self._keys.name_of(shown)
        if name is None:
            raise Unauthenticated("Incorrect API key provided")
        return name


def _shown(authorization: str, api_key: str) -> str:
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return api_key
