"""The charts of docs/charts: bars with the spread of their rounds, and the physical limit of the same run as a line;
and panels side by side.

The background is transparent; the text is a grey that is readable on white and on black. The same results give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

from benchmarks.results_reader import Spread

INK: Final = "#7b8087"
LIMIT: Final = "#d1495b"
COLOURS: Final = ("#3d82c4", "#e08e3c", "#4aa37a", "#9a7bc8", "#b5a642")
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvstore",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}

Bars = Mapping[str, Sequence[Spread | None]]


def draw(
    path: Path,
    title: str,
    axis: str,
    labels: Sequence[str],
    bars: Bars,
    limit_label: str,
    limits: float | Mapping[str, Sequence[float]],
    log: bool = False,
) -> None:
    """Draw horizontal bars: a group for each label, and in it a bar for each series. `limits`: one line for all bars,
    or one for each bar."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        height = 0.8 / len(bars)
        figure = Figure(figsize=(8, 1.3 + len(labels) * (0.22 * len(bars) + 0.2)), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, spreads) in enumerate(bars.items()):
            colour = COLOURS[number % len(COLOURS)]
            own = limits[name] if isinstance(limits, Mapping) else None
            for row, spread in enumerate(spreads):
                middle = row + (number - (len(bars) - 1) / 2) * height
                if spread is not None:
                    _bar(axes, middle, height * 0.9, spread, colour)
                if own is not None:
                    ends = (middle - height / 2, middle + height / 2)
                    axes.plot([own[row]] * 2, ends, color=LIMIT, linewidth=2)
            axes.barh([0], [0], color=colour, label=name)
        if isinstance(limits, Mapping):
            axes.plot([], [], color=LIMIT, linewidth=2, label=limit_label)
        else:
            axes.axvline(limits, color=LIMIT, linewidth=1.5, label=limit_label)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        if log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(axis)
        axes.set_title(title, loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def draw_panels(path: Path, count: int, draw: Callable[[list[Any]], None]) -> None:
    """Write a chart of so many panels, side by side."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(8.0, 3.8 * count), 3.6), layout="constrained")
        draw(list(figure.subplots(1, count, squeeze=False).flat))
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def _bar(axes: Any, middle: float, height: float, spread: Spread, colour: str) -> None:
    axes.barh(middle, spread.median, height, color=colour)
    axes.plot([spread.low, spread.high], [middle, middle], color=INK, linewidth=1)
