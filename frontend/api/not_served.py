"""Parameters that other servers know and this build does not serve: refused by name.

It does not know the served ones (openai_schema.py). A parameter that nobody knows is ignored, as
clients of OpenAI expect, and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from frontend.api.openai_schema import Body, ChatBody, CompletionBody
from tidemill.runtime.errors import Unsupported

_LOG = logging.getLogger("tidemill.frontend.http")

NOT_SERVED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "structural_tag": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "stop_regex": (),
        "typical_p": (1.0,),
        "top_a": (0,),
        "tfs_z": (1.0,),
        "xtc_probability": (0,),
        "dry_multiplier": (0,),
        "mirostat": (0,),
        "dynatemp_range": (0,),
        "repetition_detection": (),
        "no_repeat_ngram_size": (0,),
        "do_sample": (),
        "watermark": (False,),
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "custom_params": (),
        "vllm_xargs": ({},),
        "lora_path": (),
        "lora_request": (),
        "adapter_id": (),
        "session_params": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "prompt_embeds": (),
        "input_embeds": (),
        "kv_transfer_params": (),
        "data_parallel_rank": (),
        "chat_template": (),
        "documents": ([],),
        "separate_reasoning": (True,),
        "thinking_token_budget": (),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_tokens_as_token_ids": (False,),
        "details": (False,),
        "decoder_input_details": (False,),
    }
)
"""Parameters that no endpoint serves, with the values that ask for nothing."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "max_length": "max_tokens",
        "gen_length": "max_tokens",
        "method_params": "decoding.params",
        "confidence_threshold": "decoding.params.threshold, or start_threshold with adaptive",
        "parallel_decoding": "decoding.params.remasking with the name of a rule",
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "sampling_seed": "seed",
        "n_probs": "logprobs",
        "truncate": "truncate_prompt_tokens",
        "no_stop_trim": "include_stop_str_in_output",
        "return_full_text": "echo",
        "extra_key": "cache_salt",
        "request_id": "the header x-request-id",
        "rid": "the header x-request-id",
        "timeout": "the header x-request-timeout-ms",
        "input_ids": "/v1/completions with a list of token ids as prompt",
    }
)
"""What other servers call something that is served here under another name."""

OF_DECODING: Mapping[str, str] = MappingProxyType(
    {
        name: f"decoding.params.{name}"
        for name in (
            *("remasking", "steps", "threshold", "factor", "entropy_bound", "max_parallel"),
            "start_threshold",
            *("low_threshold", "alg_temp", "eos_last", "edit_threshold", "max_post_edit_steps"),
            *("block_length", "cfg_scale", "cache", "refresh_interval", "retention_ratio"),
            *("delay_step", "head_select", "pool_kernel"),
        )
    }
)
"""Knobs of diffusion, which stand in `decoding` in every API that has it. Which of them a method
has its engine knows; completions and chats take the first ones beside it too."""

OF_COMPLETIONS: Mapping[str, str] = MappingProxyType(
    {
        "top_logprobs": "logprobs with a number",
        "messages": "/v1/chat/completions",
        "add_generation_prompt": "/v1/chat/completions",
        "continue_final_message": "/v1/chat/completions",
        "chat_template_kwargs": "/v1/chat/completions",
        "reasoning_effort": "/v1/chat/completions",
        "tools": "/v1/chat/completions",
        "tool_choice": "/v1/chat/completions",
        "parallel_tool_calls": "/v1/chat/completions",
        "include_reasoning": "/v1/chat/completions",
    }
)
"""What only chats take, and what to use instead."""

OF_CHATS: Mapping[str, str] = MappingProxyType(
    {
        "echo": "prompt_logprobs, or /v1/completions",
        "prompt": "/v1/completions",
        "suffix": "/v1/completions",
    }
)
"""What only completions take, and what to use instead."""


def refuse_unserved(body: Body) -> None:
    """Raises Unsupported naming the first known parameter that asks for something."""
    other, not_served = _other_names(body), {**NOT_SERVED, **body.not_served}
    for name, value in (body.model_extra or {}).items():
        if value is None:
            continue
        if name in other:
            if value is not False:
                raise Unsupported(f"{name} is not served here; use {other[name]}", param=name)
        elif name not in not_served:
            _LOG.debug("ignored the unknown parameter %s", name[:80])
        elif value not in not_served[name]:
            raise Unsupported(f"{name} is not served by this build; leave it out", param=name)


def _other_names(body: Body) -> dict[str, str]:
    """What else to use instead of parameters that this API does not take.

    Those of completions that an API with names of its own does not know are refused there: who
    sends them counts on their effect.
    """
    knobs = OF_DECODING if "decoding" in type(body).model_fields else {}
    if isinstance(body, CompletionBody):
        return {**OTHER_NAMES, **knobs, **OF_COMPLETIONS}
    if isinstance(body, ChatBody):
        return {**OTHER_NAMES, **knobs, **OF_CHATS}
    if not body.other_names:
        return dict(OTHER_NAMES)
    names = {*CompletionBody.model_fields, *ChatBody.model_fields} - {*body.not_served}
    elsewhere = dict.fromkeys(names, "/v1/chat/completions")
    return {**OTHER_NAMES, **elsewhere, **knobs, **body.other_names}
