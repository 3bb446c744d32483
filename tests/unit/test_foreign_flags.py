"""Flags of vLLM and SGLang: either taken, or refused with what to do instead."""

import re
from pathlib import Path

import pytest

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill import cli
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.commands.spellings import SPELLINGS
from tidemill.runtime.options import flag_of, settings_of

OURS = {
    flag_of(name)
    for kind in (EngineConfig, FrontendConfig, LauncherConfig)
    for name in settings_of(kind)
}
NAMED = re.compile(r"--[a-z-]+[a-z]")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--quantization", "awq"], "--quantization: Tidemill serves no quantized weights"),
        (["--quantization=awq"], "--quantization=awq: Tidemill serves no quantized weights"),
        (["--tp", "2", "--enable-lora"], "--enable-lora: Tidemill serves no LoRA adapters"),
        (["-q", "fp8"], "-q: Tidemill serves no quantized weights"),
        (["--page-sise", "16"], "--page-sise; did you mean --page-size"),
        (["--nothing-of-the-kind"], "unknown argument --nothing-of-the-kind\n"),
    ],
)
@pytest.mark.parametrize("verb", [["serve"], ["engine"], ["bench", "latency"]], ids=" ".join)
def test_an_unknown_flag_says_what_to_do(
    capsys: pytest.CaptureFixture[str], verb: list[str], argv: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*verb, *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_so_does_a_key_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("swap-space: 4\n")
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--config={file}"])
    assert "swap_space: Tidemill moves neither weights nor KV" in capsys.readouterr().err


def test_advice_names_flags_that_there_are_for_those_that_there_are_not() -> None:
    assert not OURS & ADVICE.keys(), "taken, so it never comes to advice"
    assert not SPELLINGS.keys() & ADVICE.keys()
    for text in ADVICE.values():
        assert set(NAMED.findall(text)) <= OURS, text
    for flag, ours in SPELLINGS.items():
        assert ours.replace("--no-", "--") in OURS, flag
