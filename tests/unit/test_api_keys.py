"""Keys and their file: hashes only, read again on change, and never shown by accident."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from frontend.config import FrontendConfig
from tidemill import cli
from tidemill.runtime import options
from tidemill.runtime.errors import FailedPrecondition
from tidemill.security import keys
from tidemill.security.keys import KeyRing, new_key
from tidemill.security.watched import Watched


def test_a_new_key_opens_by_its_line_alone(tmp_path: Path) -> None:
    made, other = new_key("alice"), new_key("alice")
    assert made.key != other.key
    assert made.key not in made.line
    path = tmp_path / "keys"
    path.write_text(f"# people\n\n{made.line}\n{new_key('bob').line}\n")
    ring = KeyRing(str(path))
    assert ring.name_of(made.key) == "alice"
    wrong = (other.key, made.key[:-1], made.key + "x", made.line.split()[1], "", "\udcff")
    assert [ring.name_of(shown) for shown in wrong] == [None] * len(wrong)


def test_every_entry_is_compared_whichever_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time depends on the number of keys, not on what is shown: by construction, counted here."""
    made = [new_key(f"name{number}") for number in range(5)]
    path = tmp_path / "keys"
    path.write_text("\n".join(one.line for one in made))
    ring, compared = KeyRing(str(path)), []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(
        keys.hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both)
    )
    for shown in (made[0].key, made[4].key, "wrong"):
        compared.clear()
        ring.name_of(shown)
        assert len(compared) == 5
        assert {(len(ours), len(theirs)) for ours, theirs in compared} == {(32, 32)}


def test_two_keys_of_one_name_are_one_caller(tmp_path: Path) -> None:
    old, new = new_key("alice"), new_key("alice")
    path = tmp_path / "keys"
    path.write_text(f"{old.line}\n{new.line}\n")
    ring = KeyRing(str(path), key="one more that was chosen by hand")
    assert [ring.name_of(key) for key in (old.key, new.key)] == ["alice", "alice"]
    assert ring.name_of("one more that was chosen by hand") == "default"


@pytest.mark.parametrize(
    "line", ["alice", "alice sha256:abc", "a/b sha256:" + "0" * 64, "alice tm-secret more words"]
)
def test_a_wrong_line_is_named_by_number_and_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(FailedPrecondition, match="line 2 of") as refused:
        KeyRing(str(path))
    assert line not in str(refused.value)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(FailedPrecondition, match="cannot read --api-keys-file"):
        KeyRing(str(path))
    path.write_text("# nobody yet\n")
    with pytest.raises(FailedPrecondition, match="nobody would be let in"):
        KeyRing(str(path))


@pytest.mark.parametrize("key", ["", " x", "x ", "schl\u00fcssel", "a\nb", "\U0001f511"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    """Headers come as Latin-1: nobody would be let in, and nobody would say why."""
    with pytest.raises(FailedPrecondition, match=f"--api-key has {len(key)} characters") as refused:
        KeyRing(key=key)
    assert len(key) < 2 or key not in str(refused.value)


def test_what_changes_is_read_again_and_what_is_broken_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "thing", [0.0]
    path.write_text("1")
    seen = Watched([str(path)], lambda: int(path.read_text()), interval_s=1, clock=lambda: now[0])
    path.write_text("22")
    assert seen.current() == 1, "looked at once a second"
    now[0] += 1
    assert seen.current() == 22
    for broken in ("three", None):
        caplog.clear()
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        for _ in range(3):
            now[0] += 1
            assert seen.current() == 22
        assert caplog.text.count("what was read before stays") == 1, "said once"
    path.write_text("4444")
    now[0] += 1
    assert seen.current() == 4444


def test_what_could_not_be_opened_is_read_as_soon_as_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that came with the wrong owner or mode is mended by chmod, which changes neither its
    times nor its size: the line of a leaked key would go on to open until the next restart."""
    path, shut, now = tmp_path / "thing", [False], [0.0]

    def load() -> int:
        if shut[0]:
            raise PermissionError(13, "Permission denied", str(path))
        return int(path.read_text())

    path.write_text("1")
    seen = Watched([str(path)], load, clock=lambda: now[0])
    shut[0] = True
    path.write_text("22")
    assert [seen.current() for _ in range(3)] == [1, 1, 1]
    assert caplog.text.count("what was read before stays") == 1, "said once"
    shut[0] = False
    assert seen.current() == 22


def test_the_verb_prints_a_key_and_keeps_its_line_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    assert cli.main(["key", "new", "alice", "--file", str(path)]) == 0
    first = capsys.readouterr().out.strip()
    path.write_text(path.read_text().rstrip("\n"))
    assert cli.main(["key", "new", "bob", "--file", str(path)]) == 0
    second = capsys.readouterr().out.strip()
    ring = KeyRing(str(path))
    assert [ring.name_of(first), ring.name_of(second)] == ["alice", "bob"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first not in path.read_text()
    assert cli.main(["key", "new", "carol"]) == 0
    key, line = capsys.readouterr().out.split("\n")[:2]
    path.write_text(line)
    assert KeyRing(str(path)).name_of(key) == "carol"
    assert cli.main(["key", "new", "a b"]) == 1
    assert cli.main(["key", "old"]) == 2


def test_a_secret_is_not_printed_with_the_other_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        options.parse(
            [FrontendConfig],
            ["--print-config"],
            prog="x",
            environ={"TIDEMILL_API_KEY": "tm-very-secret"},
        )
    printed = capsys.readouterr().out
    assert "tm-very-secret" not in printed
    assert '"api_key": "(hidden)"' in printed
