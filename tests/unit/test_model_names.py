"""Names of the served model: read from the flag, told, and given back as they were asked for."""

import asyncio

import pytest

from frontend.model_names import ModelNames, read_names
from tidemill import cli
from tidemill.runtime.errors import InvalidRequest, NotFound


@pytest.mark.parametrize(
    ("written", "listed"),
    [(None, ("me/model",)), ("a", ("a",)), ("a,b", ("a", "b")), (" a, b/c ,a", ("a", "b/c"))],
)
def test_names_are_read(written: str | None, listed: tuple[str, ...]) -> None:
    names = read_names(written, "me/model")
    assert names == ModelNames(listed, "me/model")
    assert names.first == listed[0]


@pytest.mark.parametrize("written", ["", ",", "a,", "a,,b", " "])
def test_an_empty_name_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequest, match="has an empty name; pass one name, or") as caught:
        read_names(written, "me/model")
    assert caught.value.param == "served_model_name"


def test_so_it_is_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starts(*_: object) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(asyncio, "run", starts)
    assert cli.main(["serve", "--served-model-name=a,,b"]) == 1
    assert "tidemill serve: served_model_name 'a,,b' has an empty name" in capsys.readouterr().err


def test_an_answer_bears_the_name_that_was_asked_for() -> None:
    names = read_names("a,b", "me/model")
    told = {asked: names.called(asked) for asked in ("", "a", "b", "me/model")}
    assert told == {"": "a", "a": "a", "b": "b", "me/model": "me/model"}
    with pytest.raises(NotFound, match=r"'A' does not exist; this server serves 'a', 'b'$"):
        names.called("A")
