"""Opens the engine that a benchmark measures, and says what it was.

Benchmarks take the engine's own flags, so that a figure can be measured with any of them. It does
not know what is measured.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from engine_service.model_folder import check_model
from tidemill.bench.shapes import read_shape, shape_folder
from tidemill.keywords import OF_SERVICES
from tidemill.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from tidemill.llm import LLM

_DEFAULTS = EngineConfig()

NOT_SERVED = frozenset(
    {
        "admin_port",
        "drain_pause_s",
        "drain_timeout_s",
        "engine_port",
        "health_port",
        "host",
        "log_level",
        "reflection",
        "tls_cert",
        "tls_client_ca",
        "tls_key",
    }
)
"""Fields of EngineConfig that are no flags of a benchmark that starts services on loopback: it
chooses them itself."""
NOT_MEASURED = OF_SERVICES | frozenset(
    {
        "log_level",
        "max_queue_delay_s",
        "max_queued_requests",
        "max_queued_tokens",
        "prefix_caching",
        "tokenizer",
    }
)
"""The same where there is no service; and what would let the second run of a set find the first
one's prompts."""


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """`llm` with the shape it has (None: a real checkpoint) and the seconds it took to start."""

    llm: LLM
    config: EngineConfig
    shape: str | None
    start_s: float

    def hf_config(self) -> dict[str, Any] | None:
        """config.json of the shape."""
        return None if self.shape is None else read_shape(self.shape)

    def figures(self) -> dict[str, Any]:
        """What the JSON file says of the engine."""
        facts = self.llm.facts
        return {
            "shape": self.shape,
            "model": None if self.shape else self.config.model,
            "architecture": facts.architecture,
            "device": facts.device,
            "dtype": facts.dtype,
            "gpus": self.config.num_ranks,
            "max_rows": facts.max_rows,
            "max_model_len": facts.max_model_len,
            "page_size": facts.page_size,
            "num_pages": facts.num_pages,
            "start_s": round(self.start_s, 2),
            "stage_s": {name: round(spent, 2) for name, spent in facts.stage_seconds.items()},
            "engine_flags": {
                name: value for name, value in _changed(self.config).items() if name != "model"
            },
        }


@contextmanager
def open_engine(
    config: EngineConfig,
    shape: str | None,
    *,
    longest: int,
    max_rows: int | None = None,
    prefix_caching: bool = False,
) -> Iterator[OpenEngine]:
    """An LLM for requests of up to `longest` tokens, without a tokenizer; prompts are computed
    again in every run unless `prefix_caching`.

    A shape gets random weights. `longest` and `max_rows` yield to flags of the same meaning.
    Raises InvalidRequest for a shape beside a model or its weights.
    """
    if shape is None:
        check_model(config.model)
    else:
        refuse_model(config)
    with ExitStack() as stack:
        changes: dict[str, Any] = {"prefix_caching": prefix_caching}
        if shape is not None:
            folder = stack.enter_context(shape_folder(shape))
            changes |= {"model": str(folder), "load_format": "dummy"}
        if config.max_model_len is None:
            changes["max_model_len"] = longest
        if config.max_rows is None:
            changes["max_rows"] = max_rows
        _free_the_last_one()
        chosen = replace(config, **changes)
        print(f"starting {shape or config.model} ...", file=sys.stderr)
        start = time.perf_counter()
        llm = _create(chosen)
        start_s = time.perf_counter() - start
        print(f"started in {start_s:.1f} s", file=sys.stderr)
        yield OpenEngine(llm, chosen, shape, start_s)


def refuse_model(config: EngineConfig) -> None:
    """Raises InvalidRequest for flags that a shape would overrule without a word."""
    if config.model != _DEFAULTS.model:
        raise InvalidRequest("a shape stands for a model; leave --model out", param="model")
    if config.load_format not in (_DEFAULTS.load_format, "dummy"):
        raise InvalidRequest(
            "a shape has random weights; leave --load-format out", param="load_format"
        )


def _create(config: EngineConfig) -> LLM:
    from tidemill.llm import LLM

    wanted = _changed(config) | {"model": config.model}
    return LLM(skip_tokenizer_init=True, **wanted)


def _changed(config: EngineConfig) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    named = [field.name for field in fields(EngineConfig)]
    return {n: getattr(config, n) for n in named if getattr(config, n) != getattr(_DEFAULTS, n)}


def _free_the_last_one() -> None:
    """An engine that went out of scope gives its memory back before the next one asks for it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
