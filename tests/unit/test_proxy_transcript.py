"""How the streams of several engines become one answer."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_serving.proxy.ask import COMPLETIONS, understand
from kvstore_serving.proxy.transcript import MOST_TEXT, Diverged, Follower, Transcript

# Tokens and the text that each of them shows; the second and the third are parts of one character, as are the last two.
ANSWER = [(1, "a"), (2, ""), (3, "é"), (4, "b"), (5, ""), (6, "ü")]


def chunk(ids: list[int], text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": None}]}


def transcript_of(sent: list[tuple[int, str]]) -> Transcript:
    body = {"prompt": [9], "temperature": 0, "stream": True, "return_token_ids": True}
    transcript = Transcript(understand(COMPLETIONS, body))
    follower = Follower(transcript)
    for token, text in sent:
        assert follower.feed(chunk([token], text)) is not None
    return transcript


@pytest.mark.parametrize("sent", range(1, len(ANSWER) + 1))
def test_an_answer_goes_on_after_its_last_whole_character(sent: int) -> None:
    transcript = transcript_of(ANSWER[:sent])
    assert transcript.safe_ids in (1, 3, 4, 6)  # where no part of a character was sent alone
    follower = Follower(transcript, transcript.safe_ids)
    for token, text in ANSWER[transcript.safe_ids :]:
        follower.feed(chunk([token], text))
    assert transcript.ids == [token for token, _ in ANSWER]
    assert transcript.text == "aébü"


def test_tokens_that_come_several_at_a_time_are_told_apart() -> None:
    transcript = transcript_of(ANSWER[:4])
    rest = Follower(transcript).feed(chunk([1, 2, 3, 4, 5, 6], "aébü"))
    assert rest is not None and rest["choices"][0]["text"] == "ü" and rest["choices"][0]["token_ids"] == [5, 6]


@pytest.mark.parametrize("other", [chunk([7], "a"), chunk([1], "x"), chunk([1, 8], "ab")])
def test_another_answer_is_noticed_before_anything_of_it_is_sent(other: dict[str, Any]) -> None:
    transcript = transcript_of(ANSWER[:3])
    with pytest.raises(Diverged):
        Follower(transcript).feed(other)
    assert transcript.text == "aé" and transcript.ids == [1, 2, 3]


def test_of_a_text_that_is_too_long_nothing_is_kept_and_nobody_goes_on() -> None:
    body = {"model": "m", "prompt": [1], "temperature": 0, "stream": True}
    transcript = Transcript(understand(COMPLETIONS, body))
    follower = Follower(transcript)
    for number in range(9):
        chunk = {"prompt_token_ids": [1], "choices": [{"text": "x" * (MOST_TEXT // 8), "token_ids": [number]}]}
        assert follower.feed(chunk) is chunk
        assert transcript.too_long == (number == 8) and transcript.continuable == (number < 8)
    assert not transcript.text and not transcript.empty and transcript.ids == list(range(9))


def test_the_tokens_of_the_prompt_are_told_once() -> None:
    """Also where the decode engine's first event has more than the token that the user has."""

    def first(ids: list[int], text: str) -> dict[str, Any]:
        event = chunk(ids, text)
        event["choices"][0]["prompt_token_ids"] = [9]
        return event

    transcript = transcript_of([])
    shown = Follower(transcript).feed(first([1], "a"), prefill=True)
    rest = Follower(transcript).feed(first([1, 2, 3], "aé"))
    assert shown is not None and shown["choices"][0]["prompt_token_ids"] == [9]
    assert rest is not None and rest["choices"][0]["token_ids"] == [2, 3]
    assert rest["choices"][0]["prompt_token_ids"] is None
