"""Log lines: JSON off a terminal, text on one, facts bound and given."""

import json
import logging

import pytest

from tidemill.runtime import log


def record(message: str = "hello %s", **facts: object) -> logging.LogRecord:
    fields = {"name": "tidemill.x", "msg": message, "args": ("you",), "levelno": 20}
    return logging.makeLogRecord({**fields, "levelname": "INFO", "created": 0.5, **facts})


def test_json_line() -> None:
    made = record(request_id="r-1", n=2, _mark_of_a_library=7)
    event = json.loads(log.Lines("engine", for_people=False).format(made))
    assert event.pop("time").startswith("1970-01-01T00:00:00.")
    assert event == {
        "level": "info",
        "service": "engine",
        "logger": "tidemill.x",
        "message": "hello you",
        "request_id": "r-1",
        "n": 2,
    }


def test_text_line() -> None:
    line = log.Lines("engine", for_people=True).format(record(request_id="r-1"))
    assert line.endswith("info    engine: hello you request_id=r-1")


def test_a_text_line_is_one_line_whatever_others_sent() -> None:
    forged = "/x\n12:00:00.000 error engine: gone\x1b[2J\u2028"
    line = log.Lines("engine", for_people=True).format(record("%s", args=(forged,), user=forged))
    assert line.isprintable()
    assert line.count("\\n12:00") == 2
    assert "\N{DOLPHIN}" in log.Lines("e", for_people=True).format(record("\N{DOLPHIN} %s"))


def test_values_json_does_not_know_are_written_as_text() -> None:
    event = json.loads(log.Lines("engine", for_people=False).format(record(path=object)))
    assert event["path"] == "<class 'object'>"


@pytest.mark.parametrize("for_people", [True, False])
def test_an_exception_brings_its_trace(for_people: bool) -> None:
    try:
        raise ValueError("too deep")
    except ValueError as error:
        told = (type(error), error, error.__traceback__)
    line = log.Lines("engine", for_people=for_people).format(record(exc_info=told))
    assert "ValueError: too deep" in line
    assert ("\n" in line) is for_people


def test_bound_facts_add_up(caplog: pytest.LogCaptureFixture) -> None:
    bound = log.bind(logging.getLogger("tidemill.test"), request_id="r-1", trace_id="t-1")
    with caplog.at_level("INFO"):
        log.bind(bound, trace_id="t-2").info("hello", extra={"n": 3})
    (seen,) = caplog.records
    assert (seen.request_id, seen.trace_id, seen.n) == ("r-1", "t-2", 3)  # type: ignore[attr-defined]


def test_configure_sets_the_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(root, "handlers", [])
    try:
        log.configure("warning", service="engine")
        logging.getLogger("tidemill.test").info("quiet")
        logging.getLogger("tidemill.test").warning("loud")
    finally:
        root.handlers, root.level = handlers, level
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "loud"
