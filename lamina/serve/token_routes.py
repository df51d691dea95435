"""Routes that tokenize and detokenize, under the names that vLLM has for them."""

import functools
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from lamina.core.errors import RequestError
from lamina.engine.streams import Runtime
from lamina.serve.http_errors import APIError
from lamina.serve.intake import Intake
from lamina.serve.json_fields import decode_field
from lamina.serve.large_fields import decode_messages, decode_tools
from lamina.serve.requests import require_model
from lamina.text.prompts import check_tokens, encode_prompt

TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"


_NULL = msgspec.Raw(b"null")


class TokenizeBody(msgspec.Struct):
    """Body of ``POST /tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = _NULL
    tools: msgspec.Raw = _NULL
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def _tokenize(engine: Runtime, raw: bytes) -> dict[str, Any]:
    body = decode_field("the body", msgspec.json.Decoder(TokenizeBody).decode, raw)
    require_model(engine, body.model)
    converses = bytes(body.messages) != b"null"
    if (body.prompt is not None) == converses:
        raise APIError(400, "give prompt or messages", param="prompt")
    special = body.add_special_tokens
    if not converses:
        text, special = body.prompt or "", special is not False
    else:
        messages, _ = decode_field("messages", decode_messages, bytes(body.messages))
        tools, _ = decode_field("tools", decode_tools, bytes(body.tools))
        prompts = body.add_generation_prompt and not body.continue_final_message
        variables = body.chat_template_kwargs or {}
        text = engine.tokenizer.apply_chat_template(
            messages, prompts, tools or None, variables, body.continue_final_message
        )
        special = bool(special)
    tokens = encode_prompt(engine.tokenizer, text, engine.max_model_len, special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
    answer["token_strs"] = [engine.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    return answer


def _detokenize(engine: Runtime, raw: bytes) -> dict[str, Any]:
    body = decode_field("the body", msgspec.json.Decoder(DetokenizeBody).decode, raw)
    require_model(engine, body.model)
    try:
        check_tokens(body.tokens, engine.vocab_size, engine.tokenizer)
    except RequestError as error:
        raise APIError(400, str(error), param="tokens") from error
    return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def install(app: FastAPI, engine: Runtime, intake: Intake) -> None:
    """Add the routes to ``app``."""

    @app.post(TOKENIZE_PATH)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        return JSONResponse(await intake.decode_in_thread(request, functools.partial(_tokenize, engine)))

    @app.post(DETOKENIZE_PATH)
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        return JSONResponse(await intake.decode_in_thread(request, functools.partial(_detokenize, engine)))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refuse: the model generates text."""
        raise APIError(501, "this model generates text and gives no embeddings", code="not_supported")
