"""Options: precedence, types, positional, shared fields, and what is refused with which words."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill.runtime import options


@dataclass(frozen=True, slots=True, kw_only=True)
class Boat:
    """A config as small as possible, with one field of each kind."""

    name: str = "tide"
    """What it is called; 100 % free."""
    length: int = 7
    """In metres."""
    draught: float | None = None
    """In metres."""
    sails: bool = True
    """Whether it has any."""
    rig: Literal["sloop", "ketch"] = "sloop"
    """Shape of its sails."""
    cargo: dict[str, Any] = field(default_factory=dict)
    """What it carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    name: str = "tide"
    """Boat they are on."""
    hands: int
    """How many."""


def parse(*argv: str, environ: dict[str, str] | None = None, positional: str = "") -> Boat:
    (boat,) = options.parse([Boat], argv, prog="boat", environ=environ or {}, positional=positional)
    assert isinstance(boat, Boat)
    return boat


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **how: Any) -> str:
    with pytest.raises(SystemExit) as leaving:
        parse(*argv, **how)
    assert leaving.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_defaults() -> None:
    assert parse() == Boat()


def test_every_kind_of_value() -> None:
    boat = parse(
        "--name=a b", "--length", "9", "--draught", "1.5", "--no-sails", "--rig", "ketch",
        "--cargo", '{"tea": [1, 2]}',
    )  # fmt: skip
    assert boat == Boat(
        name="a b", length=9, draught=1.5, sails=False, rig="ketch", cargo={"tea": [1, 2]}
    )


def test_none_unsets_an_optional_value() -> None:
    assert parse("--draught", "none", environ={"TIDEMILL_DRAUGHT": "2"}).draught is None


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "boat.yaml"
    file.write_text("length: 1\nname: file\ndraught: 1\nsails: false\ncargo: {tea: 1}\n")
    environ = {"TIDEMILL_LENGTH": "2", "TIDEMILL_NAME": "environment", "TIDEMILL_RIG": ""}
    boat = parse("--config", str(file), "--length", "3", environ=environ)
    assert boat == Boat(
        length=3, name="environment", draught=1.0, sails=False, cargo={"tea": 1}, rig="sloop"
    )


def test_the_file_of_flags_may_be_a_variable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A --config flag goes first, and a file that is not there is told."""
    file, other = tmp_path / "boat.yaml", tmp_path / "other.yaml"
    file.write_text("length: 1\nname: sea\n")
    other.write_text("length: 2\n")
    environ = {"TIDEMILL_CONFIG": str(file), "TIDEMILL_NAME": "lake"}
    assert parse(environ=environ) == Boat(length=1, name="lake")
    assert parse("--config", str(other), environ=environ) == Boat(length=2, name="lake")
    assert parse(environ={"TIDEMILL_CONFIG": ""}) == Boat()
    said = refusal(capsys, environ={"TIDEMILL_CONFIG": str(tmp_path / "gone.yaml")})
    assert "No such file" in said
    assert "gone.yaml" in said


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("False", False), ("1", True), ("true", True)]
)
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert parse(environ={"TIDEMILL_SAILS": text}).sails is value


@pytest.mark.parametrize("argv", [["sea", "--length", "3"], ["--length", "3", "sea"]])
def test_positional_stands_anywhere(argv: list[str]) -> None:
    assert parse(*argv, positional="name") == Boat(name="sea", length=3)


@pytest.mark.parametrize(
    "argv",
    [
        ["sea", "sloop", "--length", "3"],
        ["--length", "3", "sea", "sloop"],
        ["sea", "--length", "3", "sloop"],
        ["--name", "sea", "--length", "3", "sloop"],
    ],
)
def test_several_positionals(argv: list[str]) -> None:
    assert parse(*argv, positional="name rig") == Boat(name="sea", rig="sloop", length=3)
    assert parse("lake", positional="name rig") == Boat(name="lake")


def test_shared_fields_are_one_flag() -> None:
    boat, crew = options.parse(
        [Boat, Crew], ["--name", "sea", "--hands", "2"], prog="x", environ={}
    )
    assert (boat.name, crew.name, crew.hands) == ("sea", "sea", 2)


def test_hidden_fields_keep_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    (boat,) = options.parse([Boat], [], prog="x", hidden=["name"], environ={"TIDEMILL_NAME": "sea"})
    assert boat.name == "tide"
    with pytest.raises(SystemExit):
        options.parse([Boat], ["--name", "sea"], prog="x", hidden=["name"])
    assert "unknown argument --name" in capsys.readouterr().err


def test_required_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse([Crew], [], prog="x", environ={})
    assert "missing --hands" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lenght", "3"], "unknown argument --lenght; did you mean --length?"),
        (["--length", "long"], "--length: 'long' is not INT"),
        (["--rig", "yawl"], "--rig: 'yawl' is not {sloop,ketch}"),
        (["--cargo", "[1]"], "--cargo: '[1]' is not a JSON object"),
        (["--cargo", "[]"], "--cargo: '[]' is not a JSON object"),
        (["--cargo", "{"], "--cargo: '{' is not a JSON object"),
        (["--draught", "deep"], "--draught: 'deep' is not FLOAT"),
        (["sea"], "unknown argument sea; several values of one flag stand with commas"),
        (["--config", "missing.yaml"], "No such file"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in refusal(capsys, *argv)


def test_refusals_of_a_positional(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown argument lake; several" in refusal(capsys, "sea", "lake", positional="name")
    twice = refusal(capsys, "sea", "--name", "lake", positional="name")
    assert "error: name is given twice, sea and --name=lake; leave one out" in twice
    assert "unknown argument --nmae" in refusal(capsys, "--nmae", "--name=lake", positional="name")
    three = refusal(capsys, "sea", "sloop", "lake", positional="name rig")
    assert "unknown argument lake; several values of one flag stand with commas between" in three


def test_refusals_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, environ={"TIDEMILL_LENGTH": "long"})
    assert "TIDEMILL_LENGTH: 'long' is not INT" in said
    assert "TIDEMILL_SAILS: 'maybe' is not" in refusal(capsys, environ={"TIDEMILL_SAILS": "maybe"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lenght: 3\n", "unknown key in"),
        ("lenght: 3\n", "did you mean length?"),
        ("- 3\n", "expected a mapping"),
        ("length: long\n", "boat.yaml: length: 'long' is not INT"),
        ("rig: yawl\n", "boat.yaml: rig: 'yawl' is not {sloop,ketch}"),
        ("length: [\n", "expected the node content"),
        ("length: 1\nname: a\nlength: 1\n", "boat.yaml: length is there twice; leave one of"),
        ("cargo:\n  tea: 1\n  tea: 2\n", "boat.yaml: tea is there twice"),
        ('{"length": 1, "length": 2}', "boat.yaml: length is there twice"),
    ],
)
def test_refusals_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "boat.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert words in capsys.readouterr().err


def test_printed_config_can_be_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse("--no-sails", "--draught", "2", "--cargo", '{"tea": 1}', "--print-config")
    assert leaving.value.code == 0
    file = tmp_path / "boat.json"
    file.write_text(capsys.readouterr().out)
    assert parse("--config", str(file)) == Boat(sails=False, draught=2.0, cargo={"tea": 1})


def test_help_shows_doc_default_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert leaving.value.code == 0
    assert '100 % free. ["tide"]' in text
    assert "{sloop,ketch}" in text
    assert "--no-sails" in text


def test_flags_carry_a_config_to_another_process() -> None:
    boat = Boat(name="--odd name=", sails=False, draught=2.0, cargo={"tea": None}, rig="ketch")
    words = [options.flag_of(name, getattr(boat, name)) for name in options.settings_of(Boat)]
    assert parse(*words) == boat
    assert parse(options.flag_of("draught", None)).draught is None


def test_the_services_agree_on_the_fields_they_share() -> None:
    """`tidemill serve` offers them once; host, log_level and the like must mean the same."""
    ours, theirs = options.settings_of(EngineConfig), options.settings_of(FrontendConfig)
    shared = ours.keys() & theirs.keys()
    assert {"host", "log_level", "otlp_endpoint", "drain_timeout_s"} <= shared
    for name in shared:
        assert ours[name][:2] == theirs[name][:2], name


def test_printed_config_of_the_services_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(
            [EngineConfig], ["demo-block", "--print-config"], prog="x", positional="model"
        )
    assert json.loads(capsys.readouterr().out)["model"] == "demo-block"


def test_an_empty_text_is_a_value_and_nothing_is_none(tmp_path: Path, capsys: Any) -> None:
    assert options.flag_of("name") == "--name"
    assert parse(options.flag_of("name", "")).name == ""
    file = tmp_path / "boat.yaml"
    file.write_text('name: ""\n')
    assert parse("--config", str(file)).name == ""
    with pytest.raises(SystemExit):
        parse("--name", "", "--print-config")
    file.write_text(capsys.readouterr().out)
    assert parse("--config", str(file)).name == ""
    file.write_text("name:\n")
    with pytest.raises(SystemExit):
        parse("--config", str(file))
    assert "name has no value" in capsys.readouterr().err
    file.write_text("draught:\n")
    assert parse("--config", str(file)).draught is None
