"""Draws the charts of docs/charts: bars and lines with the spread of their rounds, and panels side by side.

The physical limit of the same run is a red line. The background is transparent, and the text has a grey that is
readable on white and on black. The same results give the same bytes. matplotlib is imported only when a chart is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.render.cells import Cell, NotMeasured, Row, Rows, text
from benchmarks.render.renamed import renamed
from benchmarks.render.tables import Item, Names
from benchmarks.results_reader import Result, Results, Spread

INK: Final = "#7b8087"
LIMIT: Final = "#d1495b"
COLOURS: Final = ("#3d82c4", "#e08e3c", "#4aa37a", "#9a7bc8", "#b5a642")
ROUNDS: Final = ("median, min … max",)  # the name of the series in a chart that has only one
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvstore",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure in the style of these charts. At the end, it is written to a file."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        for each in made.findobj(Text):
            if renamed(each.get_text()) != each.get_text():
                each.set_text(renamed(each.get_text()))
        made.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def multiple(row: Row, item: Item) -> Spread:
    """Return the time of an operation as a multiple of its limit's time."""
    return row.at(item).x


@dataclass(frozen=True)
class Bars:
    """Horizontal bars in groups.

    There is a group for each row, with a bar for each operation or case of `series`, or for each word that `value`
    accepts. A bar is left out if its value was not measured. If there are no rows, there is no chart.

    `limit` is either a number or a function. A number draws one line for all bars. A function gives a line for each
    bar; with `one_limit`, the first bar's line is used for all bars.
    """

    needs: str
    title: Cell
    axis: str
    rows: Rows
    label: Cell
    series: Sequence[str] | Names
    limit_label: str
    value: Callable[[Row, Item], Spread] = multiple
    limit: float | Callable[[Row, Item], float] = 1.0
    one_limit: bool = False
    log: bool = False

    def __call__(self, results: Results, path: Path) -> None:
        """Draw it."""
        if not (rows := self.rows(results[self.needs])):
            return
        series = list(self.series(rows[0]) if callable(self.series) else self.series)
        height = 0.8 / len(series)
        with figure(path, 8, 1.3 + len(rows) * (0.22 * len(series) + 0.2)) as drawn:
            axes = drawn.add_subplot()
            for number, item in enumerate(series):
                colour = COLOURS[number % len(COLOURS)]
                for at, row in enumerate(rows):
                    middle = at + (number - (len(series) - 1) / 2) * height
                    self._bar(axes, row, item, middle, height, colour)
                axes.barh([0], [0], color=colour, label=item if isinstance(item, str) else item.name)
            if callable(self.limit) and not self.one_limit:
                axes.plot([], [], color=LIMIT, linewidth=2, label=self.limit_label)
            else:
                at_all = self.limit(rows[0], series[0]) if callable(self.limit) else self.limit
                axes.axvline(at_all, color=LIMIT, linewidth=1.5, label=self.limit_label)
            axes.set_yticks(range(len(rows)), [text(self.label, row) for row in rows])
            axes.invert_yaxis()
            if self.log:
                axes.set_xscale("log")
            else:
                axes.set_xlim(left=0)
            axes.set_xlabel(self.axis)
            axes.set_title(text(self.title, rows[0]), loc="left", fontsize=11)
            drawn.legend(loc="outside lower center", ncols=3, frameon=False)

    def _bar(self, axes: Any, row: Row, item: Item, middle: float, height: float, colour: str) -> None:
        try:
            spread = self.value(row, item)
            axes.barh(middle, spread.median, height * 0.9, color=colour)
            axes.plot([spread.low, spread.high], [middle, middle], color=INK, linewidth=1)
        except NotMeasured:
            pass
        if callable(self.limit) and not self.one_limit:
            ends = (middle - height / 2, middle + height / 2)
            axes.plot([self.limit(row, item)] * 2, ends, color=LIMIT, linewidth=2)


@dataclass(frozen=True)
class Lines:
    """A line for each series through the rows' places and values, with the spread of the rounds. `log`: whether both
    axes are logarithmic, the horizontal one in powers of two."""

    needs: str
    title: Cell
    x_axis: str
    y_axis: str
    series: Mapping[str, tuple[Rows, Callable[[Row], Spread]]]
    place: Callable[[Row], float]
    log: bool = False

    def __call__(self, results: Results, path: Path) -> None:
        """Draw it."""
        lines = {name: (rows(results[self.needs]), value) for name, (rows, value) in self.series.items()}
        if not all(rows for rows, _ in lines.values()):
            return
        first = next(iter(lines.values()))[0][0]
        with figure(path, 8, 4.5) as drawn:
            axes = drawn.add_subplot()
            for (name, (rows, value)), colour in zip(lines.items(), COLOURS, strict=False):
                spreads = [value(row) for row in rows]
                ends = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
                middles, places = [each.median for each in spreads], [self.place(row) for row in rows]
                axes.errorbar(places, middles, ends, color=colour, marker="o", markersize=4, label=name)
            if self.log:
                from matplotlib.ticker import ScalarFormatter

                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.xaxis.set_major_formatter(ScalarFormatter())
            else:
                axes.set_ylim(bottom=0)
            axes.set_xlabel(self.x_axis)
            axes.set_ylabel(self.y_axis)
            axes.set_title(text(self.title, first), loc="left", fontsize=11)
            drawn.legend(loc="outside lower center", ncols=3, frameon=False)


@dataclass(frozen=True)
class Panels:
    """Panels side by side.

    `panels` gives the content of each panel; if it is empty, there is no chart. `draw` draws one panel. `legend` is the
    number of columns of a common legend, which is the first panel's; if it is 0, each panel has its own legend.
    """

    needs: str
    panels: Callable[[Result], Iterable[Any]]
    draw: Callable[[Any, Any], None]
    legend: int = 0
    width: float = 3.8  # the width of one panel

    def __call__(self, results: Results, path: Path) -> None:
        """Draw it."""
        shown = list(self.panels(results[self.needs]))
        if not shown:
            return
        with figure(path, max(8.0, self.width * len(shown)), 3.6) as drawn:
            panels = list(drawn.subplots(1, len(shown), squeeze=False).flat)
            for axes, each in zip(panels, shown, strict=True):
                self.draw(axes, each)
            if self.legend:
                handles, labels = panels[0].get_legend_handles_labels()
                drawn.legend(handles, labels, loc="outside lower center", ncols=self.legend, frameon=False)


@dataclass(frozen=True)
class Drawn:
    """A chart that has its own drawing function."""

    needs: str
    draw: Callable[[Results, Path], None]

    def __call__(self, results: Results, path: Path) -> None:
        """Draw it."""
        self.draw(results, path)


def of(needs: str, draw: Callable[[Result, Path], None]) -> Drawn:
    """Return a chart of one result, with its own drawing function."""
    return Drawn(needs, lambda results, path: draw(results[needs], path))


Chart = Bars | Lines | Panels | Drawn
