"""The model that is being served, as the text side sees it. Replaced as a whole, never changed.

It does not know connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontend.config import FrontendConfig
from frontend.messages import EngineFacts
from frontend.model_names import ModelNames, read_names
from frontend.parsers.registry import OutputFormat, output_format
from frontend.template import ChatTemplate, load_template
from frontend.tokenizer import TextTokenizer
from tidemill.written import read_written


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`created` is in seconds since the epoch."""

    names: ModelNames
    """What clients write in `model`."""
    created: int
    facts: EngineFacts
    tokenizer: TextTokenizer
    template: ChatTemplate
    output: OutputFormat
    labels: Mapping[int, str]
    """Names of a classifier's labels, as far as the config.json beside the tokenizer's files tells:
    the checkpoint's, unless the engine or the frontend was given another folder."""

    @property
    def name(self) -> str:
        """What it is called where nobody has asked for it by a name."""
        return self.names.first

    def called(self, asked: str) -> str:
        """Its name in the answer to a request for `asked`; raises NotFound if it is another's."""
        return self.names.called(asked)


def load_model(config: FrontendConfig, facts: EngineFacts, folder: Path) -> ServedModel:
    """Reads tokenizer and template; blocks. Raises FailedPrecondition saying what is wrong."""
    tokenizer = TextTokenizer(folder)
    template = load_template(tokenizer, config.chat_template)
    return ServedModel(
        names=read_names(config.served_model_name, facts.model_id),
        created=int(time.time()),
        facts=facts,
        tokenizer=tokenizer,
        template=template,
        output=output_format(config.tool_call_parser, config.reasoning_parser, template.source),
        labels=read_labels(folder / "config.json"),
    )


def read_labels(path: Path) -> Mapping[int, str]:
    """What transformers wrote as id2label; empty where there is nothing of the kind."""
    try:
        return labels_of(json.loads(read_written(path)))
    except (OSError, ValueError, RecursionError):
        return {}


def labels_of(hf_config: Any) -> Mapping[int, str]:
    """The same of what stands in a config.json."""
    try:
        named = hf_config.get("id2label") or {}
        return {int(number): str(name) for number, name in named.items()}
    except (ValueError, AttributeError):
        return {}


def likeliest(probs: Sequence[float], labels: Mapping[int, str]) -> str:
    """The name of the label of the highest probability; of one without a name, transformers'."""
    best = max(range(len(probs)), key=probs.__getitem__)
    return labels.get(best, f"LABEL_{best}")
