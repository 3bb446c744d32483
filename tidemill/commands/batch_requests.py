"""Asks a server over HTTP what a batch asks, again where it is away or full.

It does not know files.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Callable
from email.utils import mktime_tz, parsedate_tz
from typing import Any, NamedTuple

import httpx

from tidemill.commands.batch_lines import Request, output_line
from tidemill.given import printable
from tidemill.runtime.errors import InvalidRequest

_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
_LONGEST_TOLD_S = 120.0
"""A Retry-After of more is cut to this."""
_TRY_AGAIN = frozenset({429, 502, 503})
"""Full, or away: of the server itself, and behind a proxy."""
_GONE = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""There was nobody, or nobody any more."""


class Outcome(NamedTuple):
    """What became of a request: the line of the output, and why it failed ("" if it did not).

    `is_passing`: asking again may help; `told_s` is when, if the server said so.
    """

    line: dict[str, Any]
    failure: str = ""
    is_passing: bool = False
    told_s: float = 0.0


class Server:
    """Asks one server; `on_pause` hears why a request is about to be asked again.

    When a request has used up its retries and none was answered meanwhile, the others do not wait
    that long too: each is asked once, until one is answered.
    """

    def __init__(
        self, client: httpx.AsyncClient, max_retries: int, on_pause: Callable[[str], None]
    ) -> None:
        self._client = client
        self._max_retries = max_retries
        self._on_pause = on_pause
        self._num_answers = 0
        self._is_away = False

    async def ask(self, request: Request) -> Outcome:
        """The outcome of the last attempt."""
        answers_before, num_retries = self._num_answers, 0
        while True:
            outcome = await self._once(request)
            if not outcome.is_passing:
                self._num_answers += 1
                self._is_away = False
                return outcome
            if num_retries == self._max_retries and answers_before == self._num_answers:
                self._is_away = True
            if self._is_away or num_retries == self._max_retries:
                return outcome
            self._on_pause(outcome.failure)
            await asyncio.sleep(pause_s(num_retries, outcome.told_s))
            num_retries += 1

    async def _once(self, request: Request) -> Outcome:
        try:
            response = await self._client.post(request.url, content=request.content)
        except _GONE as failure:
            outcome = _unanswered(request, "no_connection", failure)
            if lasting := _tls_failure(failure):
                return outcome._replace(failure=f"no_connection: {lasting}")
            return outcome._replace(is_passing=True)
        except httpx.TimeoutException as failure:
            return _unanswered(request, "timeout", failure)
        except httpx.RequestError as failure:
            return _unanswered(request, "no_answer", failure)
        return _answered(request, response)


def base_url(url: str) -> httpx.URL:
    """Where the routes begin, for an address with or without /v1; raises InvalidRequest."""
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as failure:
        raise InvalidRequest(f"--url is {url}: {failure}", param="url") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise InvalidRequest(
            f"--url is {url}; it must be an address like http://127.0.0.1:8000", param="url"
        )
    return base


def http_client(
    base: httpx.URL, concurrency: int, timeout_s: float | None, api_key: str = ""
) -> httpx.AsyncClient:
    """A client for `concurrency` requests at a time, each of which may take `timeout_s`.

    Raises InvalidRequest for a key that no header can hold, and where the certificates or the proxy
    that the environment names cannot be used.
    """
    shown = {"authorization": f"Bearer {printable('api_key', api_key)}"} if api_key else {}
    try:
        return httpx.AsyncClient(
            base_url=base,
            headers={"content-type": "application/json", **shown},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
        )
    except OSError as failure:  # of TLS too
        raise InvalidRequest(
            f"cannot read the certificates that SSL_CERT_FILE or SSL_CERT_DIR names: {failure}; "
            "correct the variable"
        ) from failure
    except (ValueError, ImportError, httpx.InvalidURL) as failure:
        raise InvalidRequest(
            f"cannot use the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names: {failure}"
        ) from failure


def pause_s(num_retries: int, told_s: float) -> float:
    """Seconds before the next attempt: as long as the server says, and twice as long each time.

    A little is added by chance, so that what was refused together does not come back together.
    """
    own = min(_FIRST_PAUSE_S * 2.0 ** min(num_retries, 16), _LONGEST_PAUSE_S)
    return max(own, min(told_s, _LONGEST_TOLD_S)) * random.uniform(1.0, 1.25)


def retry_after_s(text: str, now: float) -> float:
    """Seconds of a Retry-After header, which holds them or a date (RFC 9110 10.2.3); else 0."""
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        parsed = parsedate_tz(text)
        return max(0.0, mktime_tz(parsed) - now) if parsed else 0.0
    except (ValueError, OverflowError):  # a date that no calendar has
        return 0.0


def _answered(request: Request, response: httpx.Response) -> Outcome:
    status, error = response.status_code, None
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
        error = {"code": "not_json", "message": f"the answer is not JSON: {response.text[:200]!r}"}
    answer = {
        "status_code": status,
        "request_id": response.headers.get("x-request-id"),
        "body": body,
    }
    failure = f"HTTP {status}" if status != 200 else "" if error is None else "not_json"
    return Outcome(
        output_line(request.custom_id, answer, error),
        failure,
        is_passing=status in _TRY_AGAIN,
        told_s=retry_after_s(response.headers.get("retry-after", ""), time.time()),
    )


def _tls_failure(failure: BaseException) -> str:
    """Why no later attempt finds TLS that can be used there; "" if one may."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message
            return f"its certificate is not trusted ({why}); name its CA in SSL_CERT_FILE"
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
            return "it speaks no TLS; pass --url http://..."
        cause = cause.__cause__ or cause.__context__
    return ""


def _unanswered(request: Request, code: str, failure: httpx.RequestError) -> Outcome:
    message = f"{type(failure).__name__}: {failure}".rstrip(": ")
    return Outcome(output_line(request.custom_id, None, {"code": code, "message": message}), code)
