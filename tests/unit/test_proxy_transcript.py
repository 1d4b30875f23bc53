"""How the streams of several engines become one answer."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_serving.proxy.ask import COMPLETIONS, understand
from kvstore_serving.proxy.transcript import MAX_TRANSCRIPT, Diverged, StreamFollower, Transcript

# Tokens and the text of each. The second and the third are parts of one character, and so are the last two.
ANSWER = [(1, "a"), (2, ""), (3, "é"), (4, "b"), (5, ""), (6, "ü")]


def chunk(ids: list[int], text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": None}]}


def transcript_of(sent: list[tuple[int, str]]) -> Transcript:
    body = {"prompt": [9], "temperature": 0, "stream": True, "return_token_ids": True}
    transcript = Transcript(understand(COMPLETIONS, body))
    follower = StreamFollower(transcript)
    for token, text in sent:
        assert follower.feed(chunk([token], text)) is not None
    return transcript


@pytest.mark.parametrize("sent", range(1, len(ANSWER) + 1))
def test_an_answer_is_continued_after_its_last_whole_character(sent: int) -> None:
    transcript = transcript_of(ANSWER[:sent])
    assert transcript.safe_ids in (1, 3, 4, 6)  # places at which no character is incomplete
    follower = StreamFollower(transcript, transcript.safe_ids)
    for token, text in ANSWER[transcript.safe_ids :]:
        follower.feed(chunk([token], text))
    assert transcript.ids == [token for token, _ in ANSWER]
    assert transcript.text == "aébü"


def test_several_tokens_in_one_chunk_are_separated() -> None:
    transcript = transcript_of(ANSWER[:4])
    rest = StreamFollower(transcript).feed(chunk([1, 2, 3, 4, 5, 6], "aébü"))
    assert rest is not None and rest["choices"][0]["text"] == "ü" and rest["choices"][0]["token_ids"] == [5, 6]


@pytest.mark.parametrize("other", [chunk([7], "a"), chunk([1], "x"), chunk([1, 8], "ab")])
def test_a_different_answer_is_noticed_before_any_of_it_is_sent(other: dict[str, Any]) -> None:
    transcript = transcript_of(ANSWER[:3])
    with pytest.raises(Diverged):
        StreamFollower(transcript).feed(other)
    assert transcript.text == "aé" and transcript.ids == [1, 2, 3]


def test_a_too_long_text_is_dropped_and_cannot_be_continued() -> None:
    body = {"model": "m", "prompt": [1], "temperature": 0, "stream": True}
    transcript = Transcript(understand(COMPLETIONS, body))
    follower = StreamFollower(transcript)
    for number in range(9):
        chunk = {
            "prompt_token_ids": [1],
            "choices": [{"text": "x" * (MAX_TRANSCRIPT // 8), "token_ids": [number]}],
        }
        assert follower.feed(chunk) is chunk
        assert transcript.too_long == (number == 8) and transcript.continuable == (number < 8)
    assert not transcript.text and not transcript.empty and transcript.ids == list(range(9))


def test_the_prompts_tokens_are_sent_once() -> None:
    """The decode engine's first event may have more tokens than the one that the user already has."""

    def first(ids: list[int], text: str) -> dict[str, Any]:
        event = chunk(ids, text)
        event["choices"][0]["prompt_token_ids"] = [9]
        return event

    transcript = transcript_of([])
    shown = StreamFollower(transcript).feed(first([1], "a"), prefill=True)
    rest = StreamFollower(transcript).feed(first([1, 2, 3], "aé"))
    assert shown is not None and shown["choices"][0]["prompt_token_ids"] == [9]
    assert rest is not None and rest["choices"][0]["token_ids"] == [2, 3]
    assert rest["choices"][0]["prompt_token_ids"] is None
