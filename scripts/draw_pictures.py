"""Draws docs/pictures/: how blocks move between tiers, how a prompt becomes keys, and how the terms relate.

scripts/run.sh test python scripts/draw_pictures.py

Boxes and arrows are placed by hand. The background is transparent. Boxes are dark with white text and the rest is grey,
so that everything is readable on white and on black. A text that does not fit its box is an error. The output always
has the same bytes; `tests/unit/test_pictures.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "pictures"
INK: Final = "#767c84"
GREEN, BROWN, BLUE, PURPLE, RED = "#2e7050", "#8a5a1c", "#1f6299", "#60498f", "#9c3d4c"
GREY: Final = "#5a6068"
LETTER: Final = 0.56  # the mean width of a letter, as a share of the font size
HEAD: Final = 8  # the length of an arrow's head


class Picture:
    """An SVG of `width` x `height`. Coordinates are from its top left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._size = width, height
        self._parts = [f"<title>{escape(title)}</title>", f"<desc>{escape(description)}</desc>"]

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle", fill: str = INK) -> None:
        """A line of text. y: its baseline."""
        length = len(words) * size * LETTER
        left = x - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
        if left < 0 or left + length > self._size[0] or not 0 < y < self._size[1]:
            raise ValueError(f"{words!r} does not fit the picture")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str, size: int = 13) -> None:
        """A filled box with lines of text in its middle."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}"/>')
        step = size * 1.35
        for at, words in enumerate(lines):
            if len(words) * size * LETTER > width - 6 or len(lines) * step > height:
                raise ValueError(f"{words!r} does not fit its box")
            middle = y + height / 2 + size * 0.35 + (at - (len(lines) - 1) / 2) * step
            self.text(x + width / 2, middle, words, size, fill="#ffffff")

    def frame(self, x: float, y: float, width: float, height: float, label: str, dashed: bool = False) -> None:
        """A frame around other things, with a label in its top corner."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none" stroke="{INK}"'
            f' stroke-width="1.3"{dashes}/>'
        )
        if label:
            self.text(x + 10, y + 19, label, anchor="start")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        """An arrow to the second point; both: with a head at each end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        back = HEAD * 0.8
        begin = (x1 + dx * back, y1 + dy * back) if both else (x1, y1)
        self._parts.append(
            f'<line x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{x2 - dx * back:.1f}" y2="{y2 - dy * back:.1f}"'
            f' stroke="{INK}" stroke-width="1.6"/>'
        )
        for x, y, sign in ((x2, y2, 1), (x1, y1, -1))[: 2 if both else 1]:
            bx, by = x - sign * dx * HEAD, y - sign * dy * HEAD
            wx, wy = -dy * HEAD / 2, dx * HEAD / 2
            self._parts.append(
                f'<path d="M{x:.1f} {y:.1f} L{bx + wx:.1f} {by + wy:.1f} L{bx - wx:.1f} {by - wy:.1f} Z" fill="{INK}"/>'
            )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin dashed line that belongs to no arrow."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-dasharray="3 3"/>'
        )

    def svg(self) -> str:
        """Return the SVG file's text."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])


def tiers() -> Picture:
    """Three engines and a store."""
    made = Picture(
        760,
        338,
        "The tiers of a block",
        "Three engines, each with GPU and CPU memory, share one kvstore with memory and disk. Blocks are swapped "
        "between GPU and CPU, transferred between engines and store, and written to and read from the store's disk.",
    )
    for number, x in enumerate((10, 265, 520), 1):
        made.frame(x, 10, 230, 128, f"engine {number}")
        made.box(x + 15, 38, 122, 34, GREEN, "GPU")
        made.box(x + 15, 94, 122, 34, BROWN, "CPU")
        made.arrow(x + 76, 72, x + 76, 94, both=True)
        made.text(x + 150, 88, "swap", anchor="start")
        made.arrow(x + 76, 128, x + 76, 195, both=True)
        made.text(x + 90, 164, "transfer", anchor="start")
    made.frame(10, 180, 740, 148, "")
    made.box(25, 195, 710, 40, BLUE, "memory: blocks that one engine has computed, for all engines", size=14)
    made.arrow(380, 235, 380, 273, both=True)
    made.text(394, 259, "write, read", anchor="start")
    made.text(25, 259, "kvstore: one server or a cluster", anchor="start")
    made.box(25, 273, 710, 40, PURPLE, "disk: survives a restart, and may be larger than memory", size=14)
    return made


def keys() -> Picture:
    """A prompt's tokens become blocks, a chain of keys, and places on shards."""
    made = Picture(
        760,
        372,
        "From a prompt to shards",
        "A prompt's tokens are cut into blocks. The key of a block is a hash of the key before it and of the block's "
        "tokens, so a key names the block and all before it. A hash of each key chooses its shard.",
    )
    prompt = [
        ("You", "are", "a", "helpful"),
        ("bot", ".", "Answer", "briefly"),
        ("What", "is", "a", "KV"),
        ("cache", "?"),
    ]
    left, step = 102, 168
    made.text(10, 31, "tokens", anchor="start")
    made.text(10, 96, "blocks", anchor="start")
    made.text(10, 186, "keys", anchor="start")
    made.text(10, 330, "shards", anchor="start")
    shards = {number: 190 + number * 190 for number in range(3)}
    for number, x in shards.items():
        made.box(x, 306, 140, 40, PURPLE, f"shard {number}")
    for at, words in enumerate(prompt):
        x, full = left + at * step, len(words) == 4
        wide = 148 if full else 74
        made.text(x + wide / 2, 31, " ".join(words), size=12)
        made.box(x, 76, wide, 32, BLUE if full else GREY, f"block {at}" if full else "not full")
        made.arrow(x + wide / 2, 40, x + wide / 2, 76)
        if not full:
            made.text(x + wide / 2, 128, "no key yet", size=12)
            continue
        made.arrow(x + 74, 108, x + 74, 160)
        made.box(
            x, 160, 148, 44, GREEN, f"key {at}", "hash(tokens)" if not at else f"hash(key {at - 1}, tokens)", size=11
        )
        if at:
            made.arrow(x - 20, 182, x, 182)
    for at, shard in enumerate((1, 0, 2)):
        made.arrow(left + at * step + 74, 204, shards[shard] + 70, 306)
    made.text(left + 3 * step - 4, 178, "a key names its block", size=12, anchor="start")
    made.text(left + 3 * step - 4, 194, "and all before it", size=12, anchor="start")
    made.text(left + 3 * step + 18, 250, "rendezvous hashing:", size=12, anchor="start")
    made.text(left + 3 * step + 18, 266, "each key by itself", size=12, anchor="start")
    made.text(380, 364, "a block is shown with 4 tokens; engines use 16 or more", size=11)
    return made


def names() -> Picture:
    """Tenant, namespace, segment, block and slot."""
    made = Picture(
        760,
        400,
        "What belongs to what",
        "A tenant has namespaces. A namespace is a model, its dtype and a rank; all its blocks have one size. The "
        "memory of a shard, the arena, is cut into segments. A segment belongs to one namespace and is cut into "
        "slots; a slot holds one block.",
    )
    made.frame(10, 10, 484, 96, "tenant: team-a")
    made.frame(510, 10, 240, 96, "tenant: team-b")
    namespaces = (
        (25, BLUE, "Llama-3.1-8B", "rank 0 of 2: 1 MiB a block"),
        (262, GREEN, "Llama-3.1-8B", "rank 1 of 2: 1 MiB a block"),
        (525, BROWN, "Qwen2.5-7B", "896 KiB a block"),
    )
    for x, fill, model, about in namespaces:
        made.box(x, 38, 217 if x < 500 else 210, 54, fill, f"namespace: {model}", about, size=12)
    made.frame(10, 148, 740, 88, "")
    made.text(740, 167, "arena of a shard, in segments of 32 MiB", anchor="end")
    owners = (BLUE, GREEN, BLUE, BROWN, GREEN, BROWN, GREY, GREY)
    for at, fill in enumerate(owners):
        made.box(25 + at * 89.5, 178, 82, 44, fill, "segment" if fill != GREY else "free")
    made.arrow(66, 92, 66, 178)
    made.arrow(400, 92, 155.5, 178)
    made.arrow(630, 92, 334.5, 178)
    made.line(25, 222, 25, 290)
    made.line(107, 222, 735, 290)
    made.frame(10, 262, 740, 128, "", dashed=True)
    made.text(740, 374, "one segment: slots of one size", anchor="end")
    for at in range(8):
        fill = BLUE if at not in (4, 7) else GREY
        made.box(25 + at * 89.5, 290, 82, 40, fill, f"slot {at}" if fill == BLUE else "free slot", size=12)
    made.arrow(66, 350, 66, 330)
    made.text(25, 366, "a slot holds one block, with its checksum;", anchor="start", size=12)
    made.text(25, 382, "the index finds the slot of a key", anchor="start", size=12)
    return made


PICTURES: Final[dict[str, Callable[[], Picture]]] = {"tiers.svg": tiers, "keys.svg": keys, "names.svg": names}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
