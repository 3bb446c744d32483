"""What an answer may consist of: texts that must not appear, and the engine's refusals on it.

It does not know grammars: the engine compiles them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from frontend.gap import of_suffix
from frontend.request import Options, TextRequest
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported
from tidemill.structured import Constraint

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1024
_RULE = re.compile(r"(?:call|tag)_(\d+)")
"""The grammar's rule for the calls of one tool."""


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def with_bad_words(options: Options, encoder: Encoder) -> Options:
    """The options with their bad words as tokens. Raises InvalidRequest."""
    if not options.bad_words:
        return options
    sequences = (*options.sampling.bad_words, *bad_word_ids(options.bad_words, encoder))
    return replace(options, sampling=replace(options.sampling, bad_words=sequences))


def bad_word_ids(words: Sequence[str], encoder: Encoder) -> list[tuple[int, ...]]:
    """Every word as it stands, and as it is written behind another one: with a space in front.

    As in vLLM, other ways to cut a word into tokens are not looked for.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} texts; at most {MAX_BAD_WORDS} are allowed",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"a bad word has {len(word)} characters; it must have 1 to {MAX_BAD_WORD_CHARS}",
                param="bad_words",
            )
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(encoder.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return list(found)


def as_restricted(failure: ServiceError | None, options: Options) -> ServiceError | None:
    """A dead end in the words of who asked: with the parameters that left nothing to go on with,
    of which the grammar comes first. Other failures as they are."""
    if failure is None or failure.reason != "GENERATION_DEAD_END":
        return failure
    names = [options.constraint.param] if options.constraint is not None else []
    names += ["allowed_token_ids"] * bool(options.sampling.allowed_token_ids)
    names += ["bad_words"] * bool(options.sampling.bad_words or options.bad_words)
    if not names:
        return failure
    message = f"{failure.message}. It has {' and '.join(names)}; allow more"
    return InvalidRequest(message, reason=failure.reason, param=names[0])


def as_requested(refused: ServiceError, request: TextRequest) -> ServiceError:
    """The engine's refusal of a request in the words of who asked."""
    options = request.options
    echoes = options.echo and options.prompt_logprobs is None
    refused = as_asked(refused, options.constraint, request.suffix, echoes=echoes)
    message = refused.message
    for name, called in request.names.items():
        message = re.sub(rf"\b{re.escape(name)}\b", called, message)
    param = None if refused.param is None else request.called(refused.param)
    if (message, param) == (refused.message, refused.param):
        return refused
    return type(refused)(message, reason=refused.reason, param=param, facts=refused.facts)


def as_asked(
    refused: ServiceError, constraint: Constraint | None, suffix: str, *, echoes: bool = False
) -> ServiceError:
    """The engine's refusal in the words of who asked: of a grammar under the name that it was
    given, of pinned tokens for a suffix, of the prompt's scores where `echo` asked for them."""
    if isinstance(refused, Unsupported) and refused.param == "pinned" and suffix:
        return of_suffix(refused, constraint)
    if isinstance(refused, Unsupported) and refused.param == "prompt_logprobs" and echoes:
        return Unsupported(
            f"echo with logprobs asks for those of the prompt too: {refused.message}", param="echo"
        )
    param = refused.param or ""
    if constraint is None or not param.startswith(("constraint", "reasoning")):
        return refused
    if constraint.tools and refused.reason == "GRAMMAR_INVALID":
        return _of_tools(refused, constraint)
    message = refused.message.replace(f"constraint.{constraint.kind}", constraint.param)
    return type(refused)(message, reason=refused.reason, param=constraint.param)


def _of_tools(refused: ServiceError, constraint: Constraint) -> InvalidRequest:
    """Nobody has sent the grammar that calls are held to: it was made here, of what tools take."""
    why, rule = refused.facts.get("why", refused.message), refused.facts.get("rule", "")
    number, tools = _RULE.fullmatch(rule), constraint.tools
    what, param = "What one of the tools takes", constraint.param
    if rule == "answer":
        what = f"What {param} asks for"
    elif number is not None or len(tools) == 1:
        name = tools[int(number[1])] if number and int(number[1]) < len(tools) else tools[0]
        what, param = f"What the tool {name!r} takes", "tools"
    message = f"{what} does not compile: {why}. Correct it, or leave it out."
    return InvalidRequest(message, reason=refused.reason, param=param)
