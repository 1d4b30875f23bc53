"""docs/pictures/request.svg equals what its script draws from the trace in the same folder."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from scripts.request_picture import PICTURE, TRACE, draw


def test_the_picture_shows_the_trace() -> None:
    drawn = draw(json.loads(TRACE.read_text()))
    assert drawn == PICTURE.read_text(), "run scripts/run.sh full python scripts/request_picture.py"
    picture = ElementTree.fromstring(drawn)
    words = [text for each in picture.iter() if each.tag.endswith("}text") and (text := each.text)]
    assert {"Proxy", "P, prefill engine", "P to store", "Store to D", "D, decode engine"} <= set(words)
    assert any(each.tag.endswith("}desc") and each.text for each in picture), "it has a description in words"
