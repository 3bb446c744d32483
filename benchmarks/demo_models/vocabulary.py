"""The vocabulary and chat template that both packaged models share.

Token ids below 256 are the bytes themselves; a handful of special tokens follow. No merges: any
text encodes and decodes without loss, each digit is one token, and an id can be read by eye.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

MASK, EOS, SYSTEM, USER, ASSISTANT, PAD = range(256, 262)
SPECIAL_TOKENS = {
    "<|mask|>": MASK,
    "<|eos|>": EOS,
    "<|system|>": SYSTEM,
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
    "<|pad|>": PAD,
}
VOCAB_SIZE = 272
"""Rows of the embedding: 262 tokens, rounded up to a multiple of 16."""

ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|system|>' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content ~ '\\n' -}}{%- endif -%}
{{- '<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool.function | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|eos|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|user|><tool_response>\\n' ~ message.content ~ '\\n</tool_response><|eos|>' -}}
{%- elif message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Unknown role: ' ~ message.role) -}}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' -}}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|eos|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
"""Tools are told and called as Qwen's models write them (hermes). The models never saw one in
training: of themselves they call none, and what a grammar makes them call has arguments like the
answers they know."""


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(token_ids: Iterable[int]) -> str:
    """Text of the byte tokens; special tokens are dropped."""
    return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def encode_chat(messages: Iterable[tuple[str, str]]) -> list[int]:
    """Ids of (role, content) pairs as `CHAT_TEMPLATE` renders them, with a generation prompt."""
    ids: list[int] = []
    for role, content in messages:
        ids += [ROLES[role], *encode(content), EOS]
    return [*ids, ASSISTANT]


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for every byte; tokenizer files are written in them."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def tokenizer_json() -> dict[str, object]:
    """The tokenizer in the `tokenizers` library's format."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, i in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: i for i, symbol in enumerate(byte_symbols())},
            "merges": [],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: str | os.PathLike[str], content: object) -> None:
    Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
