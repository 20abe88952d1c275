"""Draw the figures of who_guesses.md: acceptance by position, and tokens against cost.

    python results/who_picture.py       # both figures of who_guesses.md, from the page's tables

Four small panels have the acceptance of each guess, a group of drafters each. A fifth has what the
best chain of each drafter makes of it. Groups differ by the shape of their marks, and the drafters
of a group by the fill of the marks, so the figure needs no colour. A drafter has the same mark in
all figures.
"""
import re
import sys
from bisect import bisect
from html import escape
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from bench import Parser, run_script  # it sets the path for what follows
from common import InputError
from support.files import write_text

STYLE = """
svg { background: #ffffff; font: 20px system-ui, "Segoe UI", Arial, sans-serif; }
text { fill: #1f2328; } .small { fill: #59636e; } .head { font-weight: 600; }
.ink { stroke: #1f2328; fill: none; stroke-width: 2; }
.thin { stroke: #8c959f; fill: none; stroke-width: 1; } .dots { stroke-dasharray: 3 5; }
.grid { stroke: #d8dee4; fill: none; stroke-width: 1; }
.full { fill: #1f2328; } .half { fill: #a8b1bb; } .empty, .bold { fill: #ffffff; }
.bold { stroke-width: 5; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #f0f6fc; } .small { fill: #9198a1; }
  .ink { stroke: #f0f6fc; } .thin { stroke: #6e7681; } .grid { stroke: #2a313c; }
  .full { fill: #f0f6fc; } .half { fill: #6e7681; } .empty, .bold { fill: #0d1117; }
}
"""
GROUPS = {"a model's call for each guess": ("small model", "early exit", "Draft & Verify"),
          "a small layer for each guess": ("EAGLE", "EAGLE-3", "Hydra"),
          "all guesses at once": ("Medusa", "DFlash", "BiTA", "PaSS"),
          "guesses that are looked up": ("n-grams", "REST", "recycling", "hybrid")}
SHAPES = ("m-6.5 -6.5h13v13h-13z", "m-7 0a7 7 0 1 0 14 0a7 7 0 1 0 -14 0z", "m0 -9.5l9 15h-18z",
          "m0 -9l9 9l-9 9l-9 -9z")  # of the marks by group: square, circle, triangle, diamond
FILLS = ("empty", "full", "half", "bold")  # by the place within a group
MARKS = {name: (shape, fill) for shape, names in zip(SHAPES, GROUPS.values())
         for name, fill in zip(names, FILLS)}
PAGE = Path(__file__).with_name("who_guesses.md")
PANELS = ((66, 84), (470, 84), (66, 436), (470, 436))  # left and top of the small panels
PLANE = (850, 84, 1190, 666)  # left, top, right and bottom of the large panel
GUESSES = 8  # of a chain, at most
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)  # of the large panel
SPEEDS = (1, 1.5, 2, 3, 4, 6)  # in times AR's, of the dotted lines


class Curve(NamedTuple):
    """Hold what is drawn of a drafter.

    name         of the drafter, one of GROUPS
    acceptance   of its first, second, … guess
    cost         of a round of its best chain, in rounds of AR
    tokens       that such a round gives
    speed        in times AR's
    """
    name: str
    acceptance: list[float]
    cost: float
    tokens: float
    speed: float


# ------------------------------------------------------------------------------ the page's tables

def read_figures(text: str) -> dict[str, list[Curve]]:
    """Read the tables of a page.

    text      of the page. The tables of a figure stand between its line and that of the next figure
    returns   {file of a figure: its curves, as `read_curves` returns them}
    """
    parts = re.split(r"^!\[.*\]\((.*)\)$", text, flags=re.M)
    return {file: read_curves(part) for file, part in zip(parts[1::2], parts[2::2])}


def read_curves(text: str) -> list[Curve]:
    """Read the two tables of a figure, of acceptance and of costs.

    returns   the drafters that have a row in both, and rounds enough for an acceptance
    """
    head, cells = [], {}
    for line in re.findall(r"^\| (.*) \|$", text, re.M):
        row = line.split(" | ")
        if row[0] == "drafter":
            head = row
        elif row[0] != "---":
            cells.setdefault(row[0], {}).update(zip(head, row))
    return [Curve(name, [float(own[f"guess {k}"]) for k in range(1, 1 + GUESSES)
                         if own[f"guess {k}"]],
                  float(own["a round costs"]), float(own["tokens a round"]), float(own["x AR"]))
            for name, own in cells.items() if "x AR" in own and own["guess 1"]]


# ------------------------------------------------------------------------------- lines and letters

def write_svg(width: int, height: int, title: str, style: str, parts: list[str]) -> str:
    """Write a picture as SVG: its size, what a screen reader says of it, its CSS and its parts."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
            f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n")


def draw_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    """Write a line of text as SVG, whose letters stand on the height y."""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}'
            '</text>')


def draw_mark(name: str, x: float, y: float) -> str:
    """Draw the mark of a drafter at a point."""
    shape, fill = MARKS[name]
    return f'<path class="ink {fill}" d="M{x:.1f} {y:.1f}{shape}"/>'


def draw_line(*points: tuple[float, float], kind: str = "thin") -> str:
    """Draw a straight line from each point to the next."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{path}"/>'


# -------------------------------------------------------------------------------------- the panels

def draw_axes(box: tuple, along: tuple, up: tuple, words: tuple[str, str],
              scale: Callable = np.asarray) -> tuple[list[str], Callable]:
    """Draw the ticks and the words of a panel.

    box      left, top, right and bottom of the panel
    along    the ticks of the axis to the right, from one end to the other
    up       the ticks of the upward axis
    words    what stands above the panel, and what below it
    scale    np.log for two logarithmic axes
    returns  the parts of the picture, and a function that finds the point of two numbers
    """
    left, top, right, bottom = box

    def place(x: float, y: float) -> tuple[float, float]:
        return (np.interp(scale(x), scale([along[0], along[-1]]), [left, right]),
                np.interp(scale(y), scale([up[0], up[-1]]), [bottom, top]))
    parts = [draw_text(left, top - 32, words[0]),
             draw_text((left + right) / 2, bottom + 50, words[1], "middle", "small")]
    for tick in along:
        x, _ = place(tick, up[0])
        parts.append(draw_text(x, bottom + 24, f"{tick:g}", "middle", "small"))
    for tick in up:
        _, y = place(along[0], tick)
        parts += [draw_line((left, y), (right, y), kind="grid"),
                  draw_text(left - 10, y + 6, f"{tick:g}", "end", "small")]
    return parts, place


def draw_labels(box: tuple, labels: list[tuple]) -> list[str]:
    """Draw labels to the right of a panel, each with a mark and a line that leads to its point.

    The labels are in the order of their points, and equally far from one another.

    box      left, top, right and bottom of the panel
    labels   triples: the name of a drafter, the text of its label, and its point
    """
    _, top, right, bottom = box
    lines, marks = [], []
    for i, (name, text, point) in enumerate(sorted(labels, key=lambda label: label[2][1])):
        height = top + (i + 0.5) / len(labels) * (bottom - top)
        lines.append(draw_line(point, (right + 18, height)))
        marks += [draw_mark(name, *point), draw_mark(name, right + 32, height),
                  draw_text(right + 46, height + 6, text)]
    return lines + marks


def draw_panel(curves: list[Curve], left: float, top: float, title: str) -> list[str]:
    """Draw the acceptance of the drafters of a group over the number of the guess."""
    box, labels = (left, top, left + 150, top + 230), []
    parts, place = draw_axes(box, (1, 2, 4, 6, GUESSES), (0, 0.5, 1),
                             (title, "number of the guess"))
    for curve in curves:
        points = [place(k, rate) for k, rate in enumerate(curve.acceptance, 1)]
        parts += [draw_line(*points, kind="ink"), *(draw_mark(curve.name, *x) for x in points)]
        labels.append((curve.name, curve.name, points[-1]))
    return parts + draw_labels(box, labels)


def draw_plane(curves: list[Curve]) -> list[str]:
    """Draw the tokens of a round over what it costs, both on logarithmic scales."""
    costs, tokens = (TICKS[:bisect(TICKS, max(numbers)) + 1] for numbers in (
        [curve.cost for curve in curves], [curve.tokens for curve in curves]))
    parts, place = draw_axes(PLANE, costs, tokens, ("tokens a round; 2×: twice as fast as AR",
                                                    "cost of a round, in rounds of AR"), np.log)
    for speed in SPEEDS:
        last = min(costs[-1], tokens[-1] / speed)
        if last > 1:
            x, y = place(last, last * speed)
            parts += [draw_line(place(1, speed), (x, y), kind="thin dots"),
                      draw_text(x, y - 8, f"{speed:g}×", "middle", "small")]
    return parts + draw_labels(PLANE, [
        (curve.name, f"{curve.name} {curve.speed:.2f}×", place(curve.cost, curve.tokens))
        for curve in curves])


def draw_figure(curves: list[Curve]) -> str:
    """Draw the figure of some drafters as an SVG picture."""
    if not curves:
        raise InputError("expected drafters with enough rounds for a picture, got none")
    parts = [draw_text(60, 28, "How often a guess is right, if those before it were", kind="head"),
             draw_text(PLANE[0], 28, "What a round costs, and what it gives", kind="head")]
    for (title, names), (left, top) in zip(GROUPS.items(), PANELS):
        parts += draw_panel([curve for curve in curves if curve.name in names], left, top, title)
    parts += draw_plane(curves)
    return write_svg(1480, 740, "Who guesses best, and what a guess costs", STYLE, parts)


def main() -> None:
    Parser(description=__doc__.partition("\n")[0]).parse_args()
    for file, curves in read_figures(PAGE.read_text(encoding="utf-8")).items():
        write_text(PAGE.with_name(file), draw_figure(curves))


if __name__ == "__main__":
    sys.exit(run_script(main))
