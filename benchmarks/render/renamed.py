"""The names that results of earlier runs use, and the present names for them in documents and charts."""

from __future__ import annotations

from typing import Final

RENAMED: Final = {
    "prefill and decode apart": "disaggregated prefill/decode",
    "apart, profiled beside each other": "P/D, profiled side by side",
    "apart, the prompt handed to nobody": "P/D, the prompt only prefilled",
    "apart, as long without a prompt": "P/D, the same time without a prompt",
    "KV comes": "KV fetched",
    "attention goes": "query sent",
    "attention beside the KV": "attention at the store",
    "nobody waits": "no waiting reads",
    "computed and filled in": "computed, store filled",
    "the longest that anybody waited": "the longest wait of all",
    "until the engine has requests again": "until the engine gets requests again",
    "in the decode side's own cache": "in the decode engine's own cache",
    "an event is on its way for": "travel time of an event",
}


def renamed(text: str) -> str:
    """Return the text with the present names."""
    for before, today in RENAMED.items():
        text = text.replace(before, today)
    return text
