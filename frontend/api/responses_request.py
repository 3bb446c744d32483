"""Bodies of POST /v1/responses as requests of the frontend."""

from __future__ import annotations

from frontend.api.openai_request import to_decoding, to_seed
from frontend.api.responses_schema import LOGPROBS, ResponsesBody
from frontend.api.responses_tools import with_tools_of
from frontend.api.responses_turns import Turns
from frontend.api.structured import of_response_format
from frontend.messages import EngineFacts
from frontend.request import Chat, Options, Sampling, TextRequest
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint


def check_combination(body: ResponsesBody, facts: EngineFacts, variables: frozenset[str]) -> None:
    """Raises ServiceError naming a parameter that does not go with another one, or with the chat
    template, which reads `variables`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.background and body.store is False:
        raise InvalidRequest(
            "background needs store: nobody could ask for the response; leave store out",
            param="background",
        )
    if body.reasoning and body.reasoning.effort and "reasoning_effort" not in variables:
        raise Unsupported(
            "reasoning.effort: the chat template of this model has no such setting; leave it out",
            param="reasoning.effort",
        )
    if body.top_logprobs is None:
        return
    if LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f'top_logprobs needs include ["{LOGPROBS}"]', param="top_logprobs")
    if not 0 <= body.top_logprobs <= facts.max_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}; it must lie in 0..{facts.max_logprobs}",
            param="top_logprobs",
        )


def to_request(body: ResponsesBody, turns: Turns) -> TextRequest:
    """The request behind POST /v1/responses; `turns` are those of all responses up to this one."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    options = Options(
        model=body.model or "",
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            seed=to_seed(body.seed),
            max_tokens=body.max_output_tokens,
        ),
        decoding=to_decoding(body.decoding),
        constraint=_constraint(body),
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        user=body.safety_identifier or body.user or "",
        session=body.prompt_cache_key or "",
    )
    effort = body.reasoning.effort if body.reasoning else None
    kwargs = {} if effort is None else {"reasoning_effort": effort}
    chat = Chat(messages=[*system, *turns], template_kwargs=kwargs)
    return TextRequest(
        prompts=(with_tools_of(body, chat),),
        options=options,
        prompt_param="input",
        names={"max_tokens": "max_output_tokens"},
    )


def _constraint(body: ResponsesBody) -> Constraint | None:
    given = body.text.format if body.text else None
    return None if given is None else of_response_format(given, "text.format")
