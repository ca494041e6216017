"""matplotlib's backend in a rank that runs cells: `show` sends the open figures to the notebook."""

from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from paceline.runtime import cells


class CellFigures(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block: Any = None) -> None:
        if (rank := cells.current()) is not None:
            rank.show_figures()


class FigureCanvas(FigureCanvasAgg):
    manager_class = CellFigures
