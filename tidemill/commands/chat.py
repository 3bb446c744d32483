"""`tidemill chat [MESSAGE]`: talks to a running server over gRPC; answers stream."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from tidemill.client import Client
from tidemill.commands.canvas import CanvasView, usage_line
from tidemill.commands.spellings import SPELLINGS
from tidemill.exchange import CallOptions, Delta
from tidemill.runtime import options
from tidemill.runtime.errors import ServiceError, Unauthenticated, Unsupported
from tidemill.sampling_params import SamplingParams
from tidemill.security.client_tls import ClientTls

_NOT_REACHED = ("failed to connect", "errors resolving")
"""How gRPC begins to tell that no connection was made, which no server of ours does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Whom to talk to, and how."""

    message: str | None = None
    """Ask this and leave; default: a conversation, one message per line, until Ctrl-D."""
    server: str = "127.0.0.1:50051"
    """Address of a frontend's gRPC interface."""
    api_key: options.Secret | None = None
    """Key for a server that asks for one; better given as the variable TIDEMILL_API_KEY."""
    tls: bool = False
    """Speak TLS; the certificate is checked against public CAs unless --tls-ca names another."""
    tls_ca: str | None = None
    """PEM file of the server's CA; speaks TLS."""
    tls_cert: str | None = None
    """PEM file of this client's certificate, for servers that ask for one."""
    tls_key: str | None = None
    """PEM file of that certificate's key."""
    model: str = ""
    """Name of the model; default: the one that is served."""
    system: str | None = None
    """Instructions that open the conversation."""
    history: bool = True
    """Send the conversation so far with every message."""
    max_tokens: int | None = None
    """Most tokens per answer; default: what the context leaves."""
    temperature: float | None = None
    """0 is greedy; default: the checkpoint's."""
    method: str | None = None
    """Decoding method; default: the model's own."""
    canvas: bool = False
    """Diffusion models: show how the block is revealed, and at the end what the answer cost."""
    timeout_s: float | None = None
    """Longest time for one answer."""


def run(argv: Sequence[str]) -> int:
    """Prints answers as they come; returns the exit status."""
    (wanted,) = options.parse(
        [ChatOptions], argv, prog="tidemill chat", positional="message", spellings=SPELLINGS
    )
    opening = [{"role": "system", "content": wanted.system}] if wanted.system else []
    said = list(opening)
    failed = False
    paths = (wanted.tls_ca, wanted.tls_cert, wanted.tls_key)
    tls = ClientTls(*paths) if wanted.tls or any(paths) else None
    with Client(wanted.server, api_key=wanted.api_key or "", tls=tls) as client:
        for message in [wanted.message] if wanted.message else _lines():
            said.append({"role": "user", "content": message})
            try:
                answer = _answer(client, said, wanted)
            except ServiceError as error:
                print(
                    f"tidemill chat: {_told(error, wanted.server, tls)}",
                    file=sys.stderr,
                )
                said.pop()
                failed = True
                continue
            said.append({"role": "assistant", "content": answer})
            if not wanted.history:
                said = list(opening)
    return int(failed)


def _told(error: ServiceError, server: str, tls: ClientTls | None) -> str:
    """The words of an error. Those of gRPC, which knows none of our commands, say nothing of what
    to do, and a server's of keys speak of headers."""
    if isinstance(error, Unauthenticated):
        return f"{error.message} (here: --api-key KEY, or the variable TIDEMILL_API_KEY)"
    if not error.message.startswith(_NOT_REACHED):
        return error.message
    certificates = "one with certificates wants --tls or --tls-ca"
    if tls is not None:
        certificates = (
            "one without certificates takes no --tls-..., --tls-ca must be the CA of its own, and "
            "one with --tls-client-ca wants --tls-cert and --tls-key: valid today, of that CA"
        )
    return (
        f"nobody speaks gRPC at {server}: start a server (tidemill serve), or pass --server "
        f"HOST:PORT of its gRPC port, not of HTTP; {certificates} ({error.message})"
    )


def _answer(client: Client, said: list[dict[str, str]], wanted: ChatOptions) -> str:
    params = SamplingParams(
        max_tokens=wanted.max_tokens, temperature=wanted.temperature, method=wanted.method
    )
    call = CallOptions(model=wanted.model, timeout_s=wanted.timeout_s, emit_canvas=wanted.canvas)
    deltas: Iterator[Delta] = client.chat_stream(said, params, call)
    if not wanted.canvas:
        return "".join(_printed(deltas))
    try:
        return _watch(client, deltas)
    except Unsupported as refused:
        if refused.param != "emit_canvas":
            raise
        raise Unsupported(
            "this model does not decode by diffusion, so --canvas has nothing to show; leave "
            "--canvas out, or talk to a diffusion model (tidemill serve demo-block)"
        ) from refused


def _printed(deltas: Iterator[Delta]) -> Iterator[str]:
    """The texts of an answer, each of them printed; its reasoning goes to stderr."""
    is_reasoning = False
    for delta in deltas:
        reasoning = delta.choice.reasoning if delta.choice else ""
        if reasoning:
            print(reasoning, end="", flush=True, file=sys.stderr)
            is_reasoning = True
        if is_reasoning and delta.text:
            print("\n", flush=True, file=sys.stderr)
            is_reasoning = False
        print(delta.text, end="", flush=True)
        yield delta.text
    print()


def _watch(client: Client, deltas: Iterator[Delta]) -> str:
    """Animates an answer where there is a terminal, and prints it; the cost goes to stderr."""
    console = Console()
    view = CanvasView(lambda token_id: client.detokenize([token_id], skip_special_tokens=False))
    seen = map(view.take, deltas)
    if console.is_terminal and not console.is_dumb_terminal:
        try:
            with Live(view, console=console, auto_refresh=False, transient=True) as live:
                for _ in seen:
                    live.refresh()
        finally:
            print(view.text)
    else:
        deque(_printed(seen), maxlen=0)
    print(usage_line(view.usage), file=sys.stderr)
    return view.text


def _lines() -> Iterator[str]:
    if sys.stdin is None:  # never open
        return
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
