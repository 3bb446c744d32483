"""The front desk: what all requests of a frontend share, and its start and end.

It does not know HTTP or gRPC; both faces ask it for a Generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from frontend.background import Background
from frontend.choosable import with_bad_words
from frontend.config import FrontendConfig
from frontend.encode_pool import EncodePool
from frontend.fleet.discovery import discovery_of
from frontend.fleet.fleet import Fleet
from frontend.fleet.fleet_metrics import FleetMetrics
from frontend.generation import Generation
from frontend.liveness import UNANSWERED_MS
from frontend.message_limit import FROM_ENGINES_BYTES
from frontend.messages import EngineFacts
from frontend.metrics import Metrics
from frontend.pooling import PoolWalk
from frontend.request import Chat, Ingress, Options, TextRequest
from frontend.roles import as_known
from frontend.served import ServedModel, load_model
from frontend.shelf import new_replica
from frontend.template_pool import TemplatePool
from frontend.validation import check_ids
from tidemill.runtime.errors import Unavailable
from tidemill.runtime.rpc import channel_options
from tidemill.security.client_tls import Dialing, client_tls
from tidemill.telemetry.tracer import Tracer

_LOG = logging.getLogger("tidemill.frontend")


def _plain(stage: str) -> AbstractContextManager[None]:
    return nullcontext()


class FrontDesk:
    """Owns the engines' sessions, the served model, metrics and the set of live requests."""

    def __init__(self, config: FrontendConfig, tracer: Tracer) -> None:
        self.config = config
        self.tracer = tracer
        self.metrics = Metrics()
        self.pool = EncodePool()
        self.replica = new_replica()
        self.background = Background()
        self._live: set[Generation | PoolWalk] = set()
        self._idle = asyncio.Event()
        self.model: ServedModel | None = None
        self._templates: TemplatePool | None = None
        self.is_draining = False
        self._is_closed = False
        self.started = time.monotonic()
        tls = client_tls(
            config.engine_tls_ca,
            config.engine_tls_cert,
            config.engine_tls_key,
            config.engine_tls_name,
        )
        self.fleet = Fleet(
            discovery_of(config.engine),
            routing=config.routing,
            dial=Dialing(
                channel_options(
                    config.max_message_bytes,
                    least_received_bytes=FROM_ENGINES_BYTES,
                    unanswered_ms=UNANSWERED_MS,
                ),
                tls,
            ),
            silence_s=config.engine_silence_s,
            models=self,
        )
        self.metrics.add(FleetMetrics(self.fleet))

    @property
    def state(self) -> str:
        """starting (no engine takes requests), ready, stalled (all are silent) or draining."""
        if self.is_draining or self.fleet.state == "draining":
            return "draining"
        state = self.fleet.state
        return state if self.model is not None and state != "connecting" else "starting"

    def check_open(self) -> None:
        """Raises Unavailable when a request comes too late for the drain. Those of HTTP never do:
        their connections are refused."""
        if self._is_closed:
            raise Unavailable(
                "this frontend is draining: it finishes running requests and then stops",
                reason="DRAINING",
                retry_after_ms=1000,
            )

    def check_ready(self) -> ServedModel:
        """The served model. Raises Unavailable, with the reason, when no engine takes requests."""
        self.fleet.check_ready()
        assert self.model is not None, "a session without a model"
        return self.model

    def model_for(self, name: str) -> ServedModel:
        """The model, if it is `called` so. Raises NotFound."""
        model = self.check_ready()
        model.called(name)
        return model

    def generation(self, request: TextRequest, ingress: Ingress) -> Generation:
        """The request's walk, to be entered with `async with`."""
        return Generation(self, request, ingress)

    @property
    def num_live(self) -> int:
        """Requests in this process."""
        return len(self._live)

    def entered(self, walk: Generation | PoolWalk) -> None:
        """A request has come in."""
        self._live.add(walk)

    def left(self, walk: Generation | PoolWalk) -> None:
        """A request has ended; the last one ends a drain."""
        self._live.discard(walk)
        if not self._live:
            self._idle.set()

    def deadline(self, received: float, timeout_s: float | None) -> float | None:
        """The deadline of a request that came with this timeout, or with none."""
        limit = self.config.request_timeout_s if timeout_s is None else timeout_s
        return None if limit is None else received + limit

    async def tokenize(
        self,
        model: ServedModel,
        prompt: str | Chat,
        add_special_tokens: bool | None,
        *,
        around: Callable[[str], AbstractContextManager[None]] = _plain,
        check: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Token ids of a text or a conversation; `around(name)` is entered around each stage.

        Special tokens are added by default to texts only: templates write their own. `check` gets
        a lower bound of the number of tokens before the text is encoded, and may raise. Raises
        Unavailable where another model is served by the end: the text may be of its template.
        """
        if isinstance(prompt, str):
            text = prompt
        else:
            with around("apply_chat_template"):
                assert self._templates is not None, "a model without its template"
                text = await self._templates.render(as_known(prompt, model.template.source))
        if check is not None:
            check(model.tokenizer.least_tokens(text))
        if add_special_tokens is None:
            add_special_tokens = isinstance(prompt, str)
        with around("tokenize"):
            token_ids = await self.pool.run(
                model.tokenizer.encode,
                text,
                size=len(text),
                add_special_tokens=add_special_tokens,
            )
        self._check_served(model)  # whose text it is, and whose engines the tokens are for
        return token_ids

    def _check_served(self, model: ServedModel) -> None:
        if self.model is None or self.model.tokenizer is not model.tokenizer:
            raise Unavailable(
                f"this server serves another model than {model.name!r} now; send the request again",
                retry_after_ms=1000,
            )

    async def with_bad_words(self, model: ServedModel, options: Options) -> Options:
        """The options with their bad words as tokens. Raises InvalidRequest."""
        if not options.bad_words:
            return options
        size = sum(map(len, options.bad_words))
        return await self.pool.run(with_bad_words, options, model.tokenizer, size=size)

    async def detokenize(
        self, model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool
    ) -> str:
        """The text of token ids. Raises InvalidRequest for ids outside of the vocabulary."""
        check_ids("tokens", token_ids, model.facts.vocab_size)
        decode = model.tokenizer.decode
        return await self.pool.run(decode, token_ids, skip_special_tokens=skip_special_tokens)

    def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """The page for Prometheus, with the engines' last load reports, and its content type."""
        name = "" if self.model is None else self.model.name
        metrics, load = self.metrics, self.fleet.load
        for gauge, value in (
            (metrics.engine_up, self.fleet.num_open),
            (metrics.num_running, load.running),
            (metrics.num_waiting, load.waiting),
            (metrics.kv_usage, load.pages_used / max(1, load.pages_total)),
        ):
            gauge.clear()  # what it was before the model had its name would stay for ever
            gauge.labels(name).set(value)
        return metrics.text(accept, self.config.metrics_alias)

    async def announce_drain(self) -> None:
        """Not ready from now on, but requests are taken. Returns after `drain_pause_s`, when
        everybody has had time to hear of it."""
        self.is_draining = True
        await asyncio.sleep(self.config.drain_pause_s)

    async def drain(self) -> None:
        """Refuses new calls, and waits for the running ones, as long as configured."""
        self._is_closed = True
        if not self._live:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _LOG.warning("%d requests outlived the drain", len(self._live))

    def cut_short(self) -> None:
        """What still runs ends with UNAVAILABLE, behind what has arrived of it."""
        self._is_closed = True
        text = "this frontend is shutting down; send the request to another one"
        self.fleet.cut_short(Unavailable(text, reason="DRAIN_TIMEOUT", retry_after_ms=1000))

    async def close(self) -> None:
        """Ends what runs in the background, the sessions with engines and the threads."""
        await self.background.close()
        await self.fleet.close()
        self.pool.close()
        if self._templates is not None:
            await self._templates.close()
        await asyncio.to_thread(self.tracer.stop)

    def needs_tokenizer(self, facts: EngineFacts) -> bool:
        """Of a (re)connected engine: only when it has changed, and was not given here."""
        return self.config.tokenizer is None and not self._is_served(facts)

    async def serve(self, facts: EngineFacts, folder: Path | None) -> None:
        """The model of a (re)connected engine, whose tokenizer is in `folder` if it is needed."""
        if self.model is not None and self._is_served(facts):
            self.model = replace(self.model, facts=facts)
            return
        given = self.config.tokenizer or folder
        assert given is not None, "a tokenizer that was not fetched"
        await self._take(await self.pool.run(load_model, self.config, facts, Path(given)))

    def _is_served(self, facts: EngineFacts) -> bool:
        served = None if self.model is None else self.model.facts
        return served is not None and (served.model_id, served.tokenizer_sha256) == (
            facts.model_id,
            facts.tokenizer_sha256,
        )

    async def _take(self, model: ServedModel) -> None:
        """Serves `model` from now on, once its template's process is up."""
        templates = TemplatePool(model.template)
        try:
            await templates.start()
        except BaseException:  # its engine may leave meanwhile: nobody else knows of the process
            await templates.close()
            raise
        before, self._templates = self._templates, templates
        self.model = model
        if before is not None:
            await before.close()
        _LOG.info("tokenizer loaded", extra={"model": model.name})
