"""The part of an answer that the user already has, and how the streams of several engines become one answer.

Pure. The beginning of the answer may come from the prefill engine, and the rest from a decode engine. After a failure,
another engine continues. A `StreamFollower` passes on the chunks of one engine:

* If the stream begins at the answer's beginning, the follower leaves out what the user has, token by token and
  character by character. If the stream differs from that, the follower raises `Diverged` before it passes on anything.
* If the stream continues the answer after its `safe_ids`, the follower does the same, and also turns the chunks into
  chunks of this answer.

What must hold: the texts that were sent, joined together, are the answer's text. All chunks have the id and the time of
the first chunk. The work for a chunk does not grow with the length of the answer, and at most `MAX_TRANSCRIPT`
characters of the answer's text are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvstore_serving.proxy.ask import ParsedRequest

MAX_TRANSCRIPT: Final = 1 << 20  # characters; a longer answer cannot be repeated by another engine


class Diverged(Exception):
    """This engine's answer differs from the beginning that the user already has. No part of this engine's answer was
    sent."""


@dataclass
class Transcript:
    """What was sent to the user in one request. Used by one task at a time."""

    ask: ParsedRequest
    head: dict[str, Any] = field(default_factory=dict)  # the id, created and model fields of all chunks
    role_sent: bool = False
    chars: int = 0
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    ids_known: bool = True  # whether the tokens of everything that was sent are known
    odd: bool = False  # whether something other than text and roles was sent
    finished: bool = False
    usage: dict[str, Any] | None = None
    # The text of all tokens up to this point is complete. If another engine continued after a part of a character, it
    # would produce different text. So it continues from this point, and what the user has beyond this point is left
    # out.
    safe_ids: int = 0
    safe_text: int = 0  # characters
    from_prefill: int = 0  # how many of the tokens came from the prefill engine
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of the text that was sent. It is incomplete if it was `too_long`."""
        return "".join(self._texts)

    @property
    def too_long(self) -> bool:
        """Whether the text was too long to be kept, so that no engine can continue it."""
        return self.chars > MAX_TRANSCRIPT

    def add(self, text: str) -> None:
        self.chars += len(text)
        if self.too_long:
            self._texts.clear()
        elif text:
            self._texts.append(text)

    @property
    def empty(self) -> bool:
        """Whether no part of the answer was sent. A role does not count."""
        return not self.chars and not self.ids and not self.odd

    @property
    def continuable(self) -> bool:
        """Whether the proxy can tell another engine exactly what was sent."""
        known = self.ids_known and not self.odd and not self.too_long and self.prompt_ids is not None
        return known and self.ask.may_continue

    def stamp(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Give a chunk the answer's id, and remove the token ids if the user did not ask for them."""
        if not self.head:
            self.head = {name: chunk[name] for name in ("id", "created", "model") if name in chunk}
        chunk.update(self.head)
        if not self.ask.shown_ids:
            for holder in (chunk, *chunk.get("choices", ())):
                for name in ("token_ids", "prompt_token_ids"):
                    if holder.get(name) is not None:
                        holder[name] = None
        return chunk

    def ending(self) -> list[dict[str, Any]]:
        """Return the chunks that end an answer whose tokens were all sent, except for chunks that were already sent."""
        chunk = self._chunk("", None, "length")
        chunks = [] if self.finished else [chunk]
        self.finished = True
        if self.ask.wants_usage and self.usage is None:
            prompt, said = len(self.prompt_ids or ()), len(self.ids)
            self.usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
            chunks.append({**chunk, "choices": [], "usage": self.usage})
        return chunks

    def of_continuation(self, chunk: dict[str, Any], said: int) -> dict[str, Any]:
        """Turn a chunk of /v1/completions that continues this answer after `said` tokens into a chunk of this
        answer."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            usage["prompt_tokens"] = usage.get("prompt_tokens", said) - said
            usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + said
        for choice in chunk.get("choices", ()):
            choice["prompt_token_ids"] = None
        if not self.ask.chat:
            return chunk
        if not chunk.get("choices"):
            return {**chunk, "object": "chat.completion.chunk"}
        choice = chunk["choices"][0]
        made = self._chunk(choice.get("text") or "", choice.get("token_ids"), choice.get("finish_reason"))
        if choice.get("finish_reason") is not None:
            made["choices"][0]["stop_reason"] = choice.get("stop_reason")
        return made

    def _chunk(self, text: str, ids: list[int] | None, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "token_ids": ids}
        choice |= {"delta": {"content": text}} if self.ask.chat else {"text": text, "stop_reason": None}
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice]}


class StreamFollower:
    """Passes on the stream of one engine. `continues`: the number of (safe) tokens after which the stream continues;
    None if the stream begins with the answer's first token."""

    def __init__(self, transcript: Transcript, continues: int | None = None) -> None:
        self._transcript = transcript
        self._continues = continues
        # What must be left out, and how much of it has arrived.
        self._had_text = transcript.text[transcript.safe_text if continues else 0 :]
        self._had_ids = transcript.ids[continues or 0 :]
        self._text_came = self._ids_came = 0

    def feed(self, chunk: dict[str, Any], *, prefill: bool = False) -> dict[str, Any] | None:
        """Return the part of this chunk for the user, or None. `prefill`: the chunk is from the prefill engine."""
        transcript = self._transcript
        if self._continues is not None:
            chunk = transcript.of_continuation(chunk, self._continues)
        if isinstance(chunk.get("usage"), dict):
            transcript.usage = chunk["usage"]
        choices = chunk.get("choices")
        if not choices:
            return transcript.stamp(chunk)
        choice = choices[0]
        prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if transcript.prompt_ids is None and isinstance(prompt_ids, list):
            transcript.prompt_ids = prompt_ids
        elif prompt_ids is not None:  # each engine sends it with its first token, but the user already has it
            for holder in (chunk, choice):
                if "prompt_token_ids" in holder:
                    holder["prompt_token_ids"] = None
        delta = choice.get("delta")
        text = (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""
        ids = choice.get("token_ids")
        finish = choice.get("finish_reason")
        role = isinstance(delta, dict) and "role" in delta
        odd = isinstance(delta, dict) and any(value for name, value in delta.items() if name not in ("role", "content"))
        if role and transcript.role_sent and not text and finish is None and not odd:
            return None
        text, ids, repeated = self._new(text, ids)
        if (finish is not None or odd) and self._leaves_out:
            raise Diverged  # it ends, or sends something else, before it has repeated all that the user has
        if repeated and not text and not ids and finish is None and not odd:
            return None
        if isinstance(delta, dict):
            if "content" in delta:
                delta["content"] = text
        else:
            choice["text"] = text
        if ids is not None:
            choice["token_ids"] = ids
        transcript.role_sent = transcript.role_sent or role
        transcript.add(text)
        transcript.odd = transcript.odd or odd
        transcript.finished = finish is not None
        if ids is None:
            transcript.ids_known = transcript.ids_known and not text
        else:
            transcript.ids += ids
            if text and len(ids) == 1 and not repeated:
                transcript.safe_ids, transcript.safe_text = len(transcript.ids), transcript.chars
            transcript.from_prefill += len(ids) if prefill else 0
        return transcript.stamp(chunk)

    @property
    def _leaves_out(self) -> bool:
        """Whether a part of what the user has must still be left out."""
        return self._text_came < len(self._had_text) or self._ids_came < len(self._had_ids)

    def _new(self, text: str, ids: list[int] | None) -> tuple[str, list[int] | None, bool]:
        """Return the text and ids that the user does not have, and whether anything was left out."""
        if not self._leaves_out:
            return text, ids, False
        if ids is not None:
            had_ids = self._had_ids[self._ids_came : self._ids_came + len(ids)]
            if ids[: len(had_ids)] != had_ids:
                raise Diverged
            self._ids_came, ids = self._ids_came + len(had_ids), ids[len(had_ids) :]
        had_text = self._had_text[self._text_came : self._text_came + len(text)]
        if not text.startswith(had_text):
            raise Diverged
        self._text_came += len(had_text)
        if ids is None and self._text_came == len(self._had_text):
            self._ids_came = len(self._had_ids)  # without token ids, only the texts are compared
        return text[len(had_text) :], ids, True
