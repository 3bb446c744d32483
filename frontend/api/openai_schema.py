"""The bodies of the OpenAI-compatible routes, with the extensions other servers taught users.

Shapes only: values are checked by frontend.validation and by the engine. Unknown fields are kept
aside (`model_extra`), so that openai_request.py can refuse what is known but not served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """`stream_options`; only for streams."""

    include_usage: bool | None = None
    """Send one last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage up to now with every chunk."""
    include_canvas: bool | None = None
    """Diffusion: send the tentative state of the block in chunks with a `canvas` and no choices."""


class DecodingBody(Body):
    """`decoding`: a method of the engine and its knobs."""

    method: str | None = None
    params: dict[str, Any] | None = None


class GenerationBody(Body):
    """What completions and chat completions share. null is the same as leaving a field out."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    """0 or -1 turns the filter off."""
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: str | list[str] | None = None
    """Up to 16 strings of up to 1024 characters; they are cut from the text."""
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Keys are token ids, written as strings."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep the last tokens of the prompt only; -1 keeps what fits."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    """Higher runs sooner."""
    cache_salt: str | None = None
    user: str | None = None
    decoding: DecodingBody | None = None
    """Decoding method and its knobs; unknown knobs are refused by the engine."""
    threshold: float | None = None
    """Block diffusion: the same as decoding.params.threshold."""
    steps: int | None = None
    """Block diffusion: the same as decoding.params.steps."""
    remasking: str | None = None
    """Block diffusion: the same as decoding.params.remasking."""


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    """str, [str], [int] or [[int]]."""
    logprobs: int | None = None
    echo: bool | None = None
    """Put the prompt in front; with logprobs its tokens are scored, max_tokens 0 only scores."""


class Message(Body):
    """One message; what else it carries is passed to the template."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: Int32 | None = None
    """Goes before max_tokens; without either, the room left in the context."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None
