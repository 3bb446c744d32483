"""One line per event: JSON, or a short text where a person watches (a terminal).

Facts ride in `extra` or are bound with `bind`; it does not know who logs what.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

START_REFUSED = MappingProxyType({"start_refused": True})
"""Fact of a line that is a service's last word because it cannot start. Who started it may say the
same with more words."""
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Bound(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds its facts (request_id, trace_id, ...) to every line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **kwargs.get("extra", {})}}


def bind(logger: logging.Logger | Bound, **facts: object) -> Bound:
    """A logger with these facts on top of those already bound."""
    base, above = (logger.logger, logger.extra or {}) if isinstance(logger, Bound) else (logger, {})
    return Bound(base, {**above, **facts})


def configure(level: str, *, service: str) -> None:
    """Sends everything of at least `level` to stderr. Called once, by a process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(service, for_people=sys.stderr.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def as_text(event: Mapping[str, Any]) -> str:
    """The line a person reads, from the fields of a JSON line. What others sent can neither begin
    another line nor steer the terminal."""
    rest = dict(event)
    clock, level, service = rest.pop("time")[11:23], rest.pop("level"), rest.pop("service")
    head, trace = f"{clock} {level:<7} {service}: {rest.pop('message')}", rest.pop("error", "")
    facts = "".join(f" {name}={value}" for name, value in rest.items() if name != "logger")
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in head + facts)
    return line + ("\n" + trace if trace else "")


class Lines(logging.Formatter):
    """Turns records into lines. Times are UTC."""

    def __init__(self, service: str, *, for_people: bool) -> None:
        super().__init__()
        self._service = service
        self._for_people = for_people

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = {name: value for name, value in vars(record).items() if name not in _OWN}
        # Libraries mark records for themselves (Ray's `_ray_timestamp_ns`).
        event |= {name: value for name, value in facts.items() if not name.startswith("_")}
        if record.exc_info:
            event["error"] = self.formatException(record.exc_info)
        return as_text(event) if self._for_people else json.dumps(event, default=str)
