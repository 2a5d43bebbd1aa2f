"""Charts with a field for each layer and role, or for each pair of classes: frozen shares and confusion matrices."""

from __future__ import annotations

from ..analysis import Run
from ..runs.schema import AuditRow
from .chart_context import ChartContext
from .charts import ChartFigure, Grid

_ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out")


def map_figure(context: ChartContext) -> ChartFigure | None:
    """Show the frozen share of each matrix by layer and role, a panel for each method that freezes or removes any."""
    charts = []
    for method, runs in context.cells.items():
        rows = [row for row in runs[0].audit.rows if row.role in _ROLES]
        sites = {(f"{row.kind} {row.layer}", row.role): row for row in rows}
        if not any(row.frozen or row.init == "identity" for row in rows):
            continue
        layers = list(dict.fromkeys(layer for layer, _ in sites))
        kinds = {layer.split()[0] for layer in layers}
        roles = [role for role in _ROLES if any(name == role for _, name in sites)]
        values = [[_frozen_share(sites.get((layer, role))) for role in roles] for layer in layers]
        charts.append(
            Grid(
                rows=[layer.split(maxsplit=1)[1] if len(kinds) == 1 else layer for layer in layers],
                columns=roles,
                values=values,
                texts=[["–" if value is None else f"{100 * value:.0f}" for value in row] for row in values],
                title=method,
                x_label=context.say("axis_role"),
                y_label=context.say("axis_layer"),
            )
        )
    return context.panels("map", charts)


def _frozen_share(row: AuditRow | None) -> float | None:
    if row is None or row.init == "identity":
        return None
    return row.frozen / (row.frozen + row.trainable) if row.frozen + row.trainable else None


def confusion_figure(context: ChartContext) -> ChartFigure | None:
    """Show the confusion matrix of each method, summed over its runs, as shares of each true class."""
    charts = []
    for method, runs in context.cells.items():
        matrices = [matrix for run in runs if (matrix := confusion_of(run))]
        if not matrices or len({len(matrix) for matrix in matrices}) != 1:
            continue
        size = range(len(matrices[0]))
        total = [[sum(matrix[i][j] for matrix in matrices) for j in size] for i in size]
        named = runs[0].result.labels or []
        labels = [str(label) for label in (named if len(named) == len(total) else size)]
        values: list[list[float | None]] = [[n / sum(row) if sum(row) else None for n in row] for row in total]
        charts.append(
            Grid(
                rows=labels,
                columns=labels,
                values=values,
                texts=[["–" if value is None else f"{100 * value:.1f}" for value in row] for row in values],
                title=method,
                x_label=context.say("axis_answer"),
                y_label=context.say("axis_truth"),
            )
        )
    return context.panels("confusion", charts)


def confusion_of(run: Run) -> list[list[int]] | None:
    """Return a classifier's confusion matrix of the last epoch, a row per true class, or None when it is not square."""
    matrix = run.result.last.confusion
    return None if not matrix or any(len(row) != len(matrix) for row in matrix) else matrix
