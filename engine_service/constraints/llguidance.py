"""Grammars by llguidance (guidance-ai/llguidance): JSON schema, regular expressions, choices, Lark,
GBNF and structural tags, over the vocabulary of the checkpoint's tokenizer.

It does not know requests or when masks are wanted.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine_service.constraints.deep_stack import on_deep_stack
from engine_service.constraints.lark_depth import shallow_gbnf, shallow_lark
from engine_service.constraints.reasoning import behind, is_special
from engine_service.constraints.schema_numbers import held_lark, held_schema, held_text
from engine_service.constraints.triggers import schema_of, trigger_finder
from engine_service.core.params import ConstraintSpec
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sentencepiece import MODEL_FILE, tokenizer_json
from tidemill.written import read_written

try:
    from llguidance import (
        LLExecutor,
        LLMatcher,
        LLParserLimits,
        LLTokenizer,
        StructTag,
        grammar_from,
    )

    _IS_INSTALLED = True
except ModuleNotFoundError:
    _IS_INSTALLED = False

MAX_TEXT = 1 << 20
"""Characters of a grammar."""
_FUEL = 20_000
"""Steps that the library's lexer may take ahead of the first token, beside one a character. It
keeps what they find, up to 250 bytes a step: with its own limit a regular expression of 22
characters, `((b{1000}){1000}){800}`, holds 237 MB."""
_MAX_FUEL = 1_000_000
"""The library's own limit: what does not compile with less may take that."""
_MAX_SYMBOLS = 30_000
"""The library takes time by the square, and nothing stops it: minutes for 100,000; others wait."""
_MAX_KEPT = 128 * _FUEL
"""Steps of all compiled grammars that are kept, the last ones used: some 600 MB at worst."""
_SILENT = 0
_EXCERPT = re.compile(r"^ *\d+ \| ", re.MULTILINE)
_PLACE = re.compile(r"at (?P<line>\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")
_SPACE: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,24}"}
"""Between tokens of JSON. Where any white space may stand, weak models fill answers with it."""


class LlMatcher:
    """core.constraint.Matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Nothing may follow, or a stop token came where the grammar accepts."""
        return self.matcher.is_stopped() and self.matcher.stop_reason() in _COMPLETE

    @property
    def failure(self) -> str:
        """A limit of the library, or a token that does not fit."""
        if not self.matcher.is_stopped() or self.is_complete:
            return ""
        text = self.matcher.get_error() or self.matcher.stop_reason()
        return f"the grammar cannot go on: {_first_line(text)}"

    def accept(self, token_id: int) -> None:
        """See Matcher."""
        self.matcher.consume_token(token_id)


class _Compiled(NamedTuple):
    """A grammar at its start, and the most steps that its lexer took so far."""

    matcher: LLMatcher
    fuel: int


class LlGrammars:
    """core.constraint.Grammars."""

    def __init__(self, folder: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`folder` is to hold tokenizer.json or tokenizer.model; all ids are below `vocab_size`.

        It is read here and not with the first grammar: where the vocabulary is large that takes
        more than a second, in which the library lets no other thread run.
        """
        self._vocab_size = vocab_size
        self._absent = ""
        try:
            self._tokenizer = _read_tokenizer(folder, vocab_size, list(eos_token_ids))
        except Exception as failure:  # the library raises what its parser raises
            self._absent = _first_line(failure)
        self._kept: OrderedDict[ConstraintSpec, _Compiled] = OrderedDict()
        self._keeping = threading.Lock()
        self._executor = LLExecutor() if _IS_INSTALLED else None

    def is_compiled(self, spec: ConstraintSpec) -> bool:
        """See Grammars."""
        return spec in self._kept

    def compile(self, spec: ConstraintSpec) -> None:
        """See Grammars."""
        self._matcher(spec)

    def open(self, spec: ConstraintSpec) -> LlMatcher:
        """See Grammars."""
        return LlMatcher(self._matcher(spec).deep_copy())

    def masks(self, matchers: Sequence[LlMatcher]) -> list[bytes]:
        """See Grammars. On as many cores as llguidance takes."""
        num_words = -(-self._vocab_size // 32)
        words = np.zeros((len(matchers), num_words), dtype=np.int32)
        live = [(one.matcher, i) for i, one in enumerate(matchers) if not one.failure]
        if live:
            assert self._executor is not None, "a matcher without llguidance"
            self._executor.unsafe_compute_mask_ptr(
                live, words.ctypes.data, num_words * 4, len(matchers)
            )
        return [line.tobytes() for line in words]

    def _matcher(self, spec: ConstraintSpec) -> LLMatcher:
        """The compiled grammar, at its start; nobody may move it."""
        with self._keeping:
            if spec in self._kept:
                self._kept.move_to_end(spec)
                return self._kept[spec].matcher
        if self._absent:
            param = f"constraint.{spec.kind}"
            raise Unsupported(f"{param}: grammars are not served here; {self._absent}", param=param)
        grammar = _grammar(spec, self._tokenizer)
        if spec.reasoning is not None:
            grammar = behind(spec.reasoning, grammar, self._tokenizer)
        made, fuel = on_deep_stack(_compiled, self._tokenizer, grammar)
        if made.is_error() and spec.reasoning is not None and spec.reasoning.lark:
            self._matcher(spec._replace(reasoning=None))  # which raises if the fault is its own
            raise _wrong(spec, made.get_error(), param="reasoning.lark")
        if made.is_error():
            raise _wrong(spec, made.get_error())
        if why := _dead_end(made):
            raise _wrong(spec, why)
        with self._keeping:
            self._kept[spec] = _Compiled(made, fuel)
            while sum(one.fuel for one in self._kept.values()) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return made


def _read_tokenizer(folder: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Raises Unsupported saying what is missing, and whatever the library does."""
    if not _IS_INSTALLED:
        raise Unsupported("llguidance is not installed: pip install 'tidemill[engine]'")
    path = Path(folder, "tokenizer.json")
    if folder and path.is_file():
        text = read_written(path)
    elif folder and Path(folder, MODEL_FILE).is_file():
        text = tokenizer_json(Path(folder))
    else:
        raise Unsupported("there is no tokenizer.json: start the engine with --tokenizer FOLDER")
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)


def _compiled(tokenizer: LLTokenizer, grammar: str) -> _Compiled:
    """With as few steps ahead as it takes; it may hold an error."""
    for fuel in (min(_FUEL + len(grammar), _MAX_FUEL), _MAX_FUEL):
        limits = LLParserLimits(max_grammar_size=_MAX_SYMBOLS, initial_lexer_fuel=fuel)
        made = LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=limits)
        if not made.is_error():
            break
    return _Compiled(made, fuel)


def _grammar(spec: ConstraintSpec, tokenizer: LLTokenizer) -> str:
    """The grammar as llguidance takes it; raises InvalidRequest."""
    if len(spec.text) > MAX_TEXT:
        raise _wrong(spec, f"it has {len(spec.text)} characters; at most {MAX_TEXT} are allowed")
    make: dict[str, Callable[[str], str]] = {
        "json_schema": _of_schema,
        "json_object": lambda _: _of_schema('{"type": "object"}'),
        "regex": LLMatcher.grammar_from_regex,
        "choice": _of_choices,
        "ebnf": _of_lark,
        "structural_tag": lambda text: _of_tags(text, tokenizer),
    }
    try:
        return make[spec.kind](spec.text)
    except KeyError as missing:
        raise _wrong(spec, f"{missing} is missing") from missing
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as failure:
        raise _wrong(spec, str(failure)) from failure


def _of_schema(text: str) -> str:
    if text.strip() == "true":  # any JSON, in the form that can hold the defaults
        text = "{}"
    return LLMatcher.grammar_from_json_schema(held_text(text), defaults=_SPACE)


def _of_lark(text: str) -> str:
    """Of GBNF, too."""
    return shallow_lark(grammar_from("grammar", held_lark(shallow_gbnf(text))))


def _of_choices(text: str) -> str:
    """One terminal: as alternatives of a rule, the library's way, 2,000 are too many."""
    given = json.loads(text)
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError("it must be a JSON list of strings")
    spelled = [json.dumps(one) for one in given if one]
    starts = ["TEXT"] * bool(spelled) + ['""'] * ("" in given)
    if not starts:
        raise ValueError("it is empty")
    terminal = f"TEXT: {' | '.join(spelled)}" if spelled else ""
    return str(grammar_from("lark", f"start: {' | '.join(starts)}\n{terminal}"))


def _of_tags(text: str, tokenizer: LLTokenizer) -> str:
    """{"structures": [{"begin", "schema" or "lark", "end"}], "triggers": [...]}: free text in which
    whatever begins with a trigger is one of the structures."""
    given = json.loads(text)
    triggers = given["triggers"]
    tags, find = [], trigger_finder(triggers)
    for one in given["structures"]:
        begin = one["begin"]
        if (trigger := find(begin)) is None:
            raise ValueError(f"no trigger begins {begin!r}; name one in triggers")
        lark = shallow_lark(held_lark(one.get("lark") or ""))
        inner = lark or {"x-guidance": _SPACE, **held_schema(schema_of(one))}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=inner, end=one["end"]))
    if not tags:
        raise ValueError("structures is empty")
    specials = [is_special(trigger, tokenizer) for trigger in triggers]
    if any(specials) and not all(specials):
        raise ValueError("triggers must all be special tokens of the model, or none of them")
    return StructTag.to_grammar(tags, assume_special=all(specials))


def _dead_end(matcher: LLMatcher) -> str:
    """Why there is no first token; empty where there is one. The library compiles grammars that no
    text ever ends (`{"$ref": "#"}`), and fails when it looks for their first mask."""
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    if not probe.is_error():
        return ""
    why = _first_line(probe.get_error())
    return "no text fits it" if why.startswith("NoExtension") else why


def _wrong(spec: ConstraintSpec, why: str, *, param: str = "") -> InvalidRequest:
    what = param or spec.kind.replace("_", " ")
    return InvalidRequest(
        f"The {what} does not compile: {_first_line(why)}. Correct it, or leave it out.",
        reason="GRAMMAR_INVALID",
        param=param or f"constraint.{spec.kind}",
        facts=_fault(why),
    )


def _fault(why: str) -> dict[str, str]:
    """What is wrong, without the lines of the grammar that the library repeats, and the name of the
    rule that it is in, for who has made the grammar of something else."""
    text = str(why).split("<state>")[0]
    said = _first_line(_EXCERPT.split(text, 1)[0])
    place = _PLACE.match(said)
    if place is None:
        return {"why": said}
    rule = re.search(rf"^ *{place['line']} \| (\w+)", text, re.MULTILINE)
    return {"why": said[place.end() :], "rule": rule[1] if rule else ""}


def _first_line(text: Any) -> str:
    """The library adds its state, and the grammar, line by line."""
    return " ".join(str(text).split("<state>")[0].split())[:300].rstrip(".")
