"""`tidemill generate [MODEL] --prompt TEXT`: completes a prompt without a server."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_service import limits
from engine_service.config import EngineConfig
from engine_service.model_folder import check_model
from tidemill.bench.engines import NOT_MEASURED
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.spellings import SPELLINGS
from tidemill.runtime import options

_OF_SERVICES = NOT_MEASURED - {"prefix_caching", "tokenizer"}
"""Flags of the engine that mean nothing where nobody is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to complete, and how."""

    prompt: str
    """Text to complete."""
    chat: bool = False
    """Send the prompt as a user's message, through the chat template."""
    n: int = 1
    """Number of completions."""
    max_tokens: int = 64
    """Most tokens to generate."""
    temperature: float | None = None
    """0 is greedy; default: the checkpoint's."""
    top_p: float | None = None
    """Smallest share of probability to sample from; default: the checkpoint's."""
    method: str | None = None
    """Decoding method; default: the model's own."""
    method_params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the method, as JSON."""


def run(argv: Sequence[str]) -> int:
    """Prints the completions to stdout; returns the exit status."""
    engine, wanted = options.parse(
        [EngineConfig, GenerateOptions],
        argv,
        prog="tidemill generate",
        advice=ADVICE,
        spellings=SPELLINGS,
        positional="model",
        hidden=_OF_SERVICES,
        check=lambda config, _: limits.check(config),
    )
    check_model(engine.model)
    from tidemill.llm import LLM
    from tidemill.sampling_params import SamplingParams

    knobs = asdict(wanted)
    prompt, chat = knobs.pop("prompt"), knobs.pop("chat")
    llm = LLM(**asdict(engine))
    ask = llm.chat if chat else llm.generate
    asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
    (output,) = ask(asked, SamplingParams(**knobs), use_tqdm=False)
    for completion in output.outputs:
        print(completion.text)
    usage = output.usage
    print(
        f"{usage.prompt_tokens} + {usage.output_tokens} tokens, {usage.forward_passes} forwards",
        file=sys.stderr,
    )
    return 0
