"""The pictures in docs/pictures equal what their scripts draw, and load nothing from elsewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.harness import ROOT

FOLDER = ROOT / "docs" / "pictures"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "draw_pictures.py"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", SCRIPT["PICTURES"])
def test_a_committed_picture_equals_what_its_script_draws(name: str) -> None:
    drawn = SCRIPT["PICTURES"][name]().svg()
    assert drawn == (FOLDER / name).read_text(encoding="utf-8"), "run `make pictures`"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.svg")), ids=lambda file: file.name)
def test_a_picture_has_a_description_and_loads_nothing(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert len(root.findtext(f"{SVG}title") or "") > 5 and len(root.findtext(f"{SVG}desc") or "") > 40
    assert set(re.findall(r"https?://[\w./-]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text and "@import" not in text and "url(http" not in text


def test_a_text_that_does_not_fit_is_an_error() -> None:
    picture = SCRIPT["Picture"](100, 100, "t", "d")
    with pytest.raises(ValueError, match="does not fit its box"):
        picture.box(0, 0, 40, 30, "#000000", "a long text")
    with pytest.raises(ValueError, match="does not fit the picture"):
        picture.text(90, 50, "a long text")
