"""What a user was sent of an answer, and how the streams of several engines become that one answer.

Pure. The answer's beginning may come from the prefill engine, its rest from a decode engine, and after a failure from
another one. A `Follower` passes on the chunks of one engine:

* of a stream that begins at the answer's beginning, it leaves out what the user has, token by token and character by
  character, and raises `Diverged` before anything else is sent if that is not the same;
* of a stream that continues the answer after its `safe_ids`, the same, and it makes chunks of the answer of them.

What must hold: the texts that were sent, joined, are the answer's text. All chunks have the id and the time of the
first. A chunk costs the same time however long the answer is, and of its text no more than `MOST_TEXT` is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvstore_serving.proxy.ask import Ask

MOST_TEXT: Final = 1 << 20  # characters; an answer with more of them cannot be given again by another engine


class Diverged(Exception):
    """This engine gives another answer than the one that the user has the beginning of. Nothing of it was sent."""


@dataclass
class Transcript:
    """What was sent. One request, one task at a time."""

    ask: Ask
    head: dict[str, Any] = field(default_factory=dict)  # id, created and model of all chunks
    role_sent: bool = False
    chars: int = 0
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    ids_known: bool = True  # of all that was sent
    odd: bool = False  # something was sent that is neither text nor role
    finished: bool = False
    usage: dict[str, Any] | None = None
    # Up to here all tokens have shown their text. After a part of a character an engine that goes on would show another
    # text, so it goes on here, and what the user has beyond is left out.
    safe_ids: int = 0
    safe_text: int = 0  # characters
    from_prefill: int = 0  # how many of the tokens came from the prefill engine
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it, unless it is `too_long`."""
        return "".join(self._texts)

    @property
    def too_long(self) -> bool:
        """Whether the text is no longer known, so that nobody can go on after it."""
        return self.chars > MOST_TEXT

    def add(self, text: str) -> None:
        self.chars += len(text)
        if self.too_long:
            self._texts.clear()
        elif text:
            self._texts.append(text)

    @property
    def empty(self) -> bool:
        """Whether nothing of the answer was sent: a role is none of it."""
        return not self.chars and not self.ids and not self.odd

    @property
    def continuable(self) -> bool:
        """Whether another engine can be told exactly what was sent."""
        known = self.ids_known and not self.odd and not self.too_long and self.prompt_ids is not None
        return known and self.ask.may_continue

    def stamp(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Give a chunk the id of the answer, and leave out the ids that the user did not ask for."""
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
        """-> the chunks that end an answer all of whose tokens were sent; those that were not sent yet."""
        chunk = self._chunk("", None, "length")
        chunks = [] if self.finished else [chunk]
        self.finished = True
        if self.ask.wants_usage and self.usage is None:
            prompt, said = len(self.prompt_ids or ()), len(self.ids)
            self.usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
            chunks.append({**chunk, "choices": [], "usage": self.usage})
        return chunks

    def of_continuation(self, chunk: dict[str, Any], said: int) -> dict[str, Any]:
        """-> a chunk of /v1/completions that continues this answer after `said` tokens, as one of this answer."""
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


class Follower:
    """Passes on what one engine streams. `continues`: after how many tokens, the safe ones, it goes on; None:
    it begins anew."""

    def __init__(self, transcript: Transcript, continues: int | None = None) -> None:
        self._transcript = transcript
        self._continues = continues
        # What is to be left out, and how much of it has come.
        self._had_text = transcript.text[transcript.safe_text if continues else 0 :]
        self._had_ids = transcript.ids[continues or 0 :]
        self._text_came = self._ids_came = 0

    def feed(self, chunk: dict[str, Any], *, prefill: bool = False) -> dict[str, Any] | None:
        """-> what the user is sent of this chunk; None: nothing. `prefill`: it is the prefill engine's."""
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
        elif prompt_ids is not None:  # each engine says it with its first token; the user has it
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
            raise Diverged  # it ends, or says something else, before all that the user has
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
        """Whether a part of what the user has did not come yet."""
        return self._text_came < len(self._had_text) or self._ids_came < len(self._had_ids)

    def _new(self, text: str, ids: list[int] | None) -> tuple[str, list[int] | None, bool]:
        """-> the part of text and ids that the user does not have, and whether there was another part."""
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
            self._ids_came = len(self._had_ids)  # an engine that names no tokens is compared by its text
        return text[len(had_text) :], ids, True
