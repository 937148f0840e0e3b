"""Matplotlib figures as inline SVG that follows the page: its ink, its colours for light and dark, its font."""

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, PAPER = "#0a0b0c", "#0a0b0d", "#0a0b0e"
SERIES = tuple(f"#0c0d{number:02x}" for number in range(8))
STEPS = tuple(f"#0e0f{number:02x}" for number in range(5))
VARIABLES = {INK: "ink", FAINT: "faint", PAPER: "paper"}
VARIABLES |= {colour: f"series-{number}" for number, colour in enumerate(SERIES)}
VARIABLES |= {colour: f"step-{number}" for number, colour in enumerate(STEPS)}
"""Placeholders that become variables of the page's style."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "metabayfl",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.6,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
POINTS_PER_INCH = 72


def draw(name: str, title: str, alternative: str, size: tuple[int, int], paint: Callable[[Axes], object]) -> str:
    """Return one pair of axes as SVG, `size` in pixels; `name` makes its ids unique on a page."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(size[0] / POINTS_PER_INCH, size[1] / POINTS_PER_INCH), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
        paint(axes)
        return _inline(_svg(figure), name, alternative)


def swatch(name: str, paint: Callable[[Axes], object]) -> str:
    """Return a small sign for a legend, drawn by matplotlib as the thing itself is."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(28 / POINTS_PER_INCH, 14 / POINTS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-1, 1), ylim=(-1, 1))
        paint(axes)
        axes.set_axis_off()
        return _inline(_svg(figure), name, "")


def _svg(figure: Figure) -> str:
    content = io.BytesIO()
    # No date and no creator: the same numbers give the same bytes.
    figure.savefig(
        content, format="svg", backend="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    return content.getvalue().decode()


def _inline(svg: str, name: str, alternative: str) -> str:
    """Make a file a part of a page: ids of its own, colours and font of the page, words for what it shows."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<(metadata|style)[ >].*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub("|".join(VARIABLES), lambda match: f"var(--{VARIABLES[match[0]]})", body)
    body = body.replace("font-family: 'DejaVu Sans'; ", "")
    box = re.search(r'viewBox="[^"]*"', body)
    inner = body[body.index(">") + 1 :]
    hidden = ' aria-hidden="true"' if not alternative else f' role="img" aria-label="{escape(alternative)}"'
    title = f"<title>{escape(alternative)}</title>" if alternative else ""
    lead = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box and box[0]}'
    return f"{lead}{hidden}>{title}{inner.strip()}"
