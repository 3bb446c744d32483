"""The flags of `tidemill bench serve`, and the points that they ask for. It asks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from tidemill.bench.bounds import AboveZero, Bounds, OneOrMore, Share, ZeroOrMore, check_bounds
from tidemill.bench.traffic import points as planned
from tidemill.bench.traffic.asked import Lengths, read_trace
from tidemill.given import printable
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.options import Listed, Secret

_SECONDS = 30.0
_STREAMS = "8"
_MAX_VOCAB = 1 << 16
LOADS = MappingProxyType(
    {
        "rate": "requests per second",
        "concurrency": "requests open at a time",
        "trace_file": "speed of the trace",
    }
)
"""What the load of a point is, by the option that asks for it."""
_OF_ONE_LOAD = MappingProxyType({"arrival_cv": (1.0, "rate"), "speed": ("1", "trace_file")})
"""The default of an option, and the one beside which alone it means something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Flags of `tidemill bench serve`, beside those of the engine that it starts without --url."""

    url: Listed | None = None
    """Addresses of the server, separated by commas and used in turn, for example
    http://127.0.0.1:8000; https for TLS, with gRPC too. Without it, services are started."""
    protocol: Literal["http", "grpc"] = "http"
    """HTTP with server-sent events, or gRPC (tidemill.v1.TextService)."""
    api: Literal["completions", "chat"] = "completions"
    """Token ids to complete, which have exact lengths, or chats."""
    rate: Listed | None = None
    """Open loop: requests per second, several rates separated by commas."""
    arrival_cv: ZeroOrMore = 1.0
    """Coefficient of variation of the times between requests of --rate: 1 Poisson, 0 even, above 1
    in bursts (gamma-distributed)."""
    concurrency: Listed | None = None
    """Closed loop: requests that are open at any time, several numbers separated by commas; 8 where
    there is neither --rate nor --trace-file."""
    trace_file: str | None = None
    """Open loop: JSONL file of {"t_s", "output_len"} with "input_len", "prompt" or "messages"."""
    speed: Listed = "1"
    """How many times as fast the trace is played, several factors separated by commas."""
    seconds: AboveZero | None = None
    """Length of the measured window; default 30, and a trace is played to its end."""
    warm_up_s: ZeroOrMore = 5.0
    """Load ahead of the window, which is left out of the figures."""
    input_len: OneOrMore = 128
    """Prompt tokens; words of a chat."""
    output_len: OneOrMore = 128
    """Tokens per answer."""
    length_spread: Share = 0.0
    """Both lengths are drawn evenly from this share below to this share above (0 to 1)."""
    vocab_size: Annotated[int, Bounds(least=1, most=_MAX_VOCAB)] = 256
    """Prompts hold random token ids below this; the default fits every model."""
    temperature: ZeroOrMore = 0.0
    """Temperature of all requests."""
    ignore_eos: bool = True
    """Ask for answers of full length; --no-ignore-eos for servers that refuse the field."""
    slo_ttft_ms: AboveZero | None = None
    """Goodput: longest time to the first token."""
    slo_tpot_ms: AboveZero | None = None
    """Goodput: longest time per output token."""
    slo_e2e_ms: AboveZero | None = None
    """Goodput: longest time to the end."""
    clients: OneOrMore = 1
    """Client processes that share the load."""
    timeout_s: AboveZero = 600.0
    """Of one request, from when it was due."""
    served_model: str | None = None
    """Name in the requests; default: the first one that the server lists."""
    api_key: Secret | None = None
    """Key for the server; better given as the variable TIDEMILL_API_KEY, because other users of the
    machine see command lines."""
    tls_ca: str | None = None
    """With https: PEM file of the CA of the server's certificate; default: public CAs."""
    client_cert: str | None = None
    """With https: PEM file of a certificate to show to a server with mTLS."""
    client_key: str | None = None
    """PEM file of that certificate's key."""
    load_seed: int = 0
    """Seed of arrivals, lengths and prompts. A server that runs on has the prompts of an earlier
    run with the same seed in its prefix cache."""
    plot: str | None = None
    """PNG file for a picture (needs matplotlib)."""
    shape: str | None = None
    """Without --url: model shape with random weights instead of --model, as of `bench online`."""
    frontends: OneOrMore = 1
    """Without --url: frontend processes that share the load."""
    data_parallel_size: OneOrMore = 1
    """Without --url: engines behind them, as of `tidemill serve`."""

    @property
    def urls(self) -> tuple[str, ...]:
        """None of them: services are to be started."""
        return () if self.url is None else tuple(url.strip() for url in self.url.split(","))


def points_of(options: ServeOptions) -> tuple[str, list[planned.Point]]:
    """The option that asks for the load, and the points. Raises InvalidRequest for values that
    cannot work, naming them."""
    _check(options)
    said = [name for name in LOADS if getattr(options, name) is not None]
    if len(said) > 1:
        raise InvalidRequest(f"choose one of {' and '.join(said)}", param=said[1])
    kind = said[0] if said else "concurrency"
    for name, (default, load) in _OF_ONE_LOAD.items():
        if kind != load and getattr(options, name) != default:
            raise InvalidRequest(f"{name} is for {load}, and the load is by {kind}", param=name)
    wish = planned.Wish(
        lengths=Lengths(options.input_len, options.output_len, options.length_spread),
        vocab_size=options.vocab_size,
        is_chat=options.api == "chat",
        seed=options.load_seed,
        cv=options.arrival_cv,
        warm_up_s=options.warm_up_s,
        seconds=_SECONDS if options.seconds is None else options.seconds,
    )
    if kind == "rate":
        return kind, planned.at_rates(wish, _numbers("rate", options.rate or ""))
    if kind == "concurrency":
        counts = _numbers("concurrency", options.concurrency or _STREAMS, whole=True)
        return kind, planned.at_concurrencies(wish, [int(count) for count in counts])
    if options.seconds is not None:
        raise InvalidRequest("a trace is played to its end; leave out --seconds", param="seconds")
    lines = read_trace(
        options.trace_file or "", is_chat=wish.is_chat, output_len=options.output_len
    )
    return kind, planned.of_trace(wish, lines, _numbers("speed", options.speed))


def _check(options: ServeOptions) -> None:
    check_bounds(options)
    printable("api_key", options.api_key or "")
    for url in options.urls:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{url!r} does not begin with http:// or https://", param="url")
    for name, default in (("shape", None), ("frontends", 1), ("data_parallel_size", 1)):
        if options.urls and getattr(options, name) != default:
            raise InvalidRequest(f"{name} is for services that this starts; --url names others")


def _numbers(name: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        numbers = [float(int(word) if whole else float(word)) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidRequest(f"{name}: {text!r} is not a list of {kind} above 0", param=name)
    return numbers
