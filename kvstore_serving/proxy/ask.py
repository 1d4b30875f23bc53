"""The user's request, and the requests that the proxy sends to engines for it.

Pure. A `ParsedRequest` is a request's JSON with the properties that the proxy must know. They say whether the user may
be shown another engine's first token, and whether another engine may continue or repeat an answer. They depend on how
the engine samples tokens, so each property is false in case of doubt:

* plain: the request asks for one answer to one prompt, with text only. The text and tokens already sent then describe
  the answer completely.
* steady: the same request gives the same answer, except for rounding errors, because it has temperature 0 or a seed.
* may_continue: another request may continue the answer, if its prompt ends with what was already sent. Penalties and
  grammars rule this out: they depend on the answer's own tokens, which would then count as a part of the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvstore_serving.proxy.settings import PROXY_POLICIES

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_LAST_TOKEN: Final = (1 << 31) - 1
_MANY_TOKENS: Final = 4096  # the number assumed for an answer without a limit
_DEFAULT_MAX_TOKENS: Final = 16  # the default for completions in OpenAI's API
POLICY_HEADER: Final = "x-kvstore-policy"
_OURS: Final = ("do_remote_decode", "do_remote_prefill")

# Fields that make an answer more than one text.
_NOT_PLAIN: Final = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo", "use_beam_search", "prompt_embeds"),
    *("tools", "functions", "suffix", "return_prompt_text", "return_tokens_as_token_ids"),
)
# Fields that depend on the tokens of the answer so far, or change the prompt.
_LOOKS_BACK: Final = (
    *("presence_penalty", "frequency_penalty", "structured_outputs", "bad_words", "thinking_token_budget"),
    *("repetition_detection", "watermarking", "truncate_prompt_tokens", "documents", "mm_processor_kwargs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
# Fields that a continuation takes over from the request that it continues.
_SAMPLING: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias"),
    *("allowed_token_ids", "priority", "user", "cache_salt", "vllm_xargs", "session_id", "stream_interval"),
)


class BadRequest(ValueError):
    """No engine can serve the request. `param`: the name of the wrong field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotUnderstood(ValueError):
    """The body is not a request of this API. The proxy lets an engine report that."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request of a user. Immutable."""

    path: str
    body: Mapping[str, Any]
    shown_ids: bool = False  # whether the user asked for token ids
    policy: str = ""  # the policy that this request asks for; empty: the proxy's policy applies

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's tokens, if the request contains them."""
        prompt = self.body.get("prompt")
        if not self.chat and isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        return None

    @property
    def brings_tokens(self) -> bool:
        """Whether the user sends a chat's tokens in addition to its messages."""
        return (self.body.get("kv_transfer_params") or {}).get("prompt_token_ids") is not None

    @property
    def is_text(self) -> bool:
        """Whether the prompt's tokens describe all of it, so that engines may get tokens instead of the text."""
        body = self.body
        if body.get("truncate_prompt_tokens") is not None or _asked(body.get("return_prompt_text")):
            return False
        return _only_text(body.get("messages")) if self.chat else isinstance(body.get("prompt"), str)

    @property
    def max_tokens(self) -> int | None:
        """The highest number of tokens in an answer. It is None if the answer may have as many as fit."""
        names = ("max_completion_tokens", "max_tokens") if self.chat else ("max_tokens",)
        given = next((self.body[name] for name in names if self.body.get(name) is not None), None)
        if given is None:
            return None if self.chat else _DEFAULT_MAX_TOKENS
        return given if type(given) is int else None

    @property
    def most_output(self) -> int:
        """The approximate highest number of tokens in all answers together."""
        many = self.body.get("n")
        return (self.max_tokens or _MANY_TOKENS) * (many if type(many) is int and many > 0 else 1)

    @property
    def stops(self) -> list[str]:
        stop = self.body.get("stop")
        if isinstance(stop, str):
            return [stop]
        return [each for each in stop if isinstance(each, str)] if isinstance(stop, list) else []

    @property
    def plain(self) -> bool:
        body = self.body
        one_prompt = self.chat or isinstance(body.get("prompt"), str) or self.token_ids is not None
        return (
            one_prompt
            and body.get("n") in (None, 1)
            and body.get("best_of") in (None, 1)
            and not any(_asked(body.get(name)) for name in _NOT_PLAIN)
        )

    @property
    def greedy(self) -> bool:
        temperature = self.body.get("temperature")
        return isinstance(temperature, int | float) and temperature == 0

    @property
    def steady(self) -> bool:
        return self.greedy or type(self.body.get("seed")) is int

    @property
    def wants_usage(self) -> bool:
        """Whether a stream's last chunk must contain the usage."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def may_continue(self) -> bool:
        body = self.body
        response_format = body.get("response_format") or {"type": "text"}
        options = body.get("stream_options") or {}
        return (
            self.plain
            and not any(body.get(name) for name in _LOOKS_BACK)
            and isinstance(response_format, dict)
            and response_format.get("type") == "text"
            and isinstance(options, dict)
            and not options.get("continuous_usage_stats")
            and (not self.chat or _only_text(body.get("messages")))
        )

    @property
    def splittable(self) -> bool:
        """Whether a prefill on another engine helps.

        It does not help if the answering engine must return the prompt's logits, because that engine then computes the
        prompt anyway. It does not help either if any part of the prompt is embeddings, because sending them twice costs
        more bytes than the split saves.
        """
        body = self.body
        return not (
            any(_asked(body.get(name)) for name in ("prompt_logprobs", "echo", "use_beam_search", "prompt_embeds"))
            or _has_embeddings(body.get("messages"))
        )

    # ---- what is sent to engines -----------------------------------------------------------------------------

    def seeded(self) -> ParsedRequest:
        """Return this request made steady: with a random seed if it has neither a seed nor temperature 0."""
        if self.steady:
            return self
        return replace(self, body={**self.body, "seed": secrets.randbits(32)})

    def for_prefill(self, tokens: list[int] | None = None, *, shown: bool) -> dict[str, Any]:
        """Return the request for the prefill engine: the prompt and one token.

        tokens: the prompt's tokens, if they are known
        shown: whether the token is shown to the user; the answer must then be a stream
        """
        body = dict(self.body)
        self._hand_over(body, "do_remote_decode", tokens)
        for name in ("max_tokens", "max_completion_tokens", "n", "best_of", "logprobs", "top_logprobs"):
            body.pop(name, None)
        body["max_completion_tokens" if self.chat else "max_tokens"] = 1
        if body.get("min_tokens"):
            body["min_tokens"] = 1
        if shown:
            body["return_token_ids"] = True
            body["stream_options"] = {**(self.body.get("stream_options") or {}), "include_usage": True}
        else:
            body["stream"] = False
            body.pop("stream_options", None)
        return body

    def for_decode(self, tokens: list[int] | None = None, *, split: bool) -> dict[str, Any]:
        """Return the request for the decode engine.

        split: whether a prefill engine computes the prompt at the same time
        tokens: the prompt's tokens, if they are known
        """
        body = dict(self.body)
        if split:
            self._hand_over(body, "do_remote_prefill", tokens)
        if self.stream and self.plain:
            body["return_token_ids"] = True
            if not self.wants_usage:  # the usage has the number of cached tokens; `continuous_usage_stats` needs it
                options = {"include_usage": True, "continuous_usage_stats": False}
                body["stream_options"] = {**(self.body.get("stream_options") or {}), **options}
        return body

    def continued(self, prompt_ids: list[int], said: list[int], max_model_len: int | None) -> dict[str, Any] | None:
        """Return a /v1/completions request that continues after the tokens `said`, or None if no token is left to
        generate.

        Its prompt is given as tokens and not as text, also for a chat: the same text may be split into other tokens,
        and templates change the ends of messages.
        """
        most = self.max_tokens
        if most is None and max_model_len is not None:
            most = max_model_len - len(prompt_ids)
        left = None if most is None else most - len(said)
        if left is not None and left <= 0:
            return None
        body = {name: self.body[name] for name in (*_SAMPLING, "stream_options") if self.body.get(name) is not None}
        body |= {"prompt": prompt_ids + said, "stream": True, "return_token_ids": True, "add_special_tokens": False}
        if left is not None:
            body["max_tokens"] = left
        least = self.body.get("min_tokens")
        if type(least) is int and least > len(said):
            body["min_tokens"] = least - len(said)
        given = self.body.get("kv_transfer_params")
        if given:
            body["kv_transfer_params"] = dict(given)
        return body

    def _hand_over(self, body: dict[str, Any], flag: str, tokens: list[int] | None) -> None:
        transfer = body["kv_transfer_params"] = {**(self.body.get("kv_transfer_params") or {}), flag: True}
        if tokens is not None and self.chat:
            transfer["prompt_token_ids"] = tokens  # vLLM uses these tokens instead of rendering the messages
        elif tokens is not None:
            body["prompt"] = tokens


def understand(path: str, body: object, policy: str = "") -> ParsedRequest:
    """Return the parsed request. `policy`: the policy that the request asks for. Raises `BadRequest` or `NotUnderstood`
    if the request cannot be served."""
    if policy and policy not in PROXY_POLICIES:
        raise BadRequest(
            f"{POLICY_HEADER} is {policy[:100]!r}; expected one of {', '.join(PROXY_POLICIES)}", POLICY_HEADER
        )
    if not isinstance(body, dict):
        raise NotUnderstood
    given = body.get("kv_transfer_params")
    if given is not None and not isinstance(given, dict):
        raise NotUnderstood
    for flag in _OURS:
        if given and flag in given:
            raise BadRequest(
                f"kv_transfer_params.{flag} was given, but only the proxy may set it; you may give `kvstore` there",
                "kv_transfer_params",
            )
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise NotUnderstood
    prompt = body.get("prompt")
    tokens = [each for each in prompt if type(each) is int] if isinstance(prompt, list) else []
    if tokens and not 0 <= min(tokens) <= max(tokens) <= _LAST_TOKEN:
        wrong = next(each for each in tokens if not 0 <= each <= _LAST_TOKEN)
        raise BadRequest(f"prompt has the token id {wrong}; expected 0 to {_LAST_TOKEN}", "prompt")
    return ParsedRequest(path, body, bool(body.get("return_token_ids")), policy)


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named: Final = msgspec.json.Decoder(_Named).decode


def model_of(body: bytes) -> str | None:
    """Return the model that a body names, or None if it is not JSON or names none."""
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def with_trace(body: dict[str, Any], traceparent: str) -> dict[str, Any]:
    """Return the body with the trace added for the engine's connector. The header alone is not enough: an engine drops
    it unless the engine itself records traces."""
    given = body.get("kv_transfer_params") or {}
    ours = given.get("kvstore") or {}
    if not isinstance(ours, dict):
        return body  # the engine reports what is wrong with it
    return {**body, "kv_transfer_params": {**given, "kvstore": {**ours, "traceparent": traceparent}}}


def _asked(value: object) -> bool:
    """Return whether the field is set to a value that asks for something. For `logprobs`, even 0 does."""
    return value is not None and value is not False and value not in ("", [], {})


def _has_embeddings(messages: object) -> bool:
    """Return whether a chat has a part with embeddings. Engines recognise it by its type or by the name of a field."""
    if isinstance(messages, list):
        return any(map(_has_embeddings, messages))
    if isinstance(messages, dict):
        return (
            messages.get("type") == "prompt_embeds"
            or "prompt_embeds" in messages
            or _has_embeddings(messages.get("content"))
        )
    return False


def _only_text(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return len(contents) == len(messages) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts
    )
