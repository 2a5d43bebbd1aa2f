"""What the charts of one setup share: its runs, its measure, and how their figures are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis import Run
from ..analysis.arms import Setup
from ..analysis.compare import Comparison
from ..analysis.run import Attempt
from .charts import Chart, ChartFigure, Styles
from .words import Words

# Most panels of a figure. When there are more methods, the caption says how many are left out.
_PANELS = 6


@dataclass(frozen=True, kw_only=True)
class ChartContext:
    """A setup, and what all of its charts share.

    `cells` has the runs of each method at the learning rate that the report shows it at.
    """

    setup: Setup
    cells: dict[str, tuple[Run, ...]]
    running: list[Attempt]
    comparisons: Sequence[Comparison]
    number: int
    styles: Styles
    say: Words

    @property
    def factor(self) -> float:
        """Return the factor of the measure's values in a chart: shares are shown in percent."""
        return 100.0 if self.setup.measure.points else 1.0

    @property
    def measure(self) -> str:
        """Return the name of the setup's measure in the report's language."""
        return self.say(f"m_{self.setup.measure.name}")

    @property
    def measure_axis(self) -> str:
        """Return the label of an axis with the setup's measure."""
        return f"{self.measure} (%)" if self.setup.measure.points else self.measure

    @property
    def time_axes(self) -> dict[str, str]:
        """Return the two axes of a chart over time."""
        return {"steps": self.say("axis_steps"), "seconds": self.say("axis_seconds")}

    def figure(self, kind: str, title: str, caption: str, chart: Chart) -> ChartFigure:
        """Return a figure of one chart, named after the setup's number and the kind of chart."""
        return ChartFigure(f"{self.number}-{kind}", title, caption, [chart])

    def panels(self, kind: str, charts: Sequence[Chart]) -> ChartFigure | None:
        """Return a figure of one panel per method, at most `_PANELS`, or None when there is none."""
        if not charts:
            return None
        caption = self.say(f"cap_{kind}")
        if len(charts) > _PANELS:
            caption = f"{caption} {self.say('cap_panels', shown=_PANELS, all=len(charts))}"
        return ChartFigure(f"{self.number}-{kind}", self.say(f"fig_{kind}"), caption, list(charts[:_PANELS]))
