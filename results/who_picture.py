"""Draw the figure of who_guesses.py: acceptance by position, and tokens against cost.

    python results/who_picture.py       # both figures of who_guesses.md, from the page's tables

Four small panels have the acceptance of each guess, a group of drafters each. A fifth has what the
best chain of each drafter makes of it. Groups differ by the shape of their marks, and the drafters
of a group by the fill of the marks and by the dashes of the lines, so the figure needs no colour.
A drafter has the same mark in all figures.
"""
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from bench import Parser, run_script  # it sets the path for what follows
from common import InputError
from training.files import write_text as write_file

STYLE = """
svg { background: #ffffff; font: 20px system-ui, "Segoe UI", Arial, sans-serif; }
text { fill: #1f2328; } .small { fill: #59636e; } .head { font-weight: 600; }
.ink { stroke: #1f2328; fill: none; stroke-width: 2; }
.thin { stroke: #8c959f; fill: none; stroke-width: 1; }
.grid { stroke: #d8dee4; fill: none; stroke-width: 1; }
.full { fill: #1f2328; } .half { fill: #a8b1bb; } .empty { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #f0f6fc; } .small { fill: #9198a1; }
  .ink { stroke: #f0f6fc; } .thin { stroke: #6e7681; } .grid { stroke: #2a313c; }
  .full { fill: #f0f6fc; } .half { fill: #6e7681; } .empty { fill: #0d1117; }
}
"""
GROUPS = {"a model's call for each guess": ("small model", "early exit", "Draft & Verify"),
          "a small layer for each guess": ("EAGLE", "EAGLE-3", "Hydra"),
          "all guesses at once": ("Medusa", "DFlash", "BiTA", "PaSS"),
          "guesses that are looked up": ("n-grams", "REST", "recycling", "hybrid")}
SHAPES = ("m-6.5 -6.5h13v13h-13z", "m-7 0a7 7 0 1 0 14 0a7 7 0 1 0 -14 0z", "m0 -9.5l9 15h-18z",
          "m0 -9l9 9l-9 9l-9 -9z")  # of the marks by group: square, circle, triangle, diamond
FILLS = ("empty", "full", "half", "dot")  # by the place within a group
DASHES = ("", "9 5", "2 4", "12 4 2 4")
PAGE = Path(__file__).with_name("who_guesses.md")
WIDTH, HEIGHT = 1480, 740
PANELS = ((66, 84), (470, 84), (66, 436), (470, 436))  # left and top of the small panels
PANEL, TALL, GUESSES = 150, 230, 8  # width and height of a small panel, and the guesses it shows
PLANE = (850, 84, 1190, 666)  # left, top, right and bottom of the large panel
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SPEEDS = (1.5, 2, 3, 4, 6)  # in times AR's, of the dotted lines
LEAST = 0.8  # the smallest cost and the fewest tokens of the plane


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
    returns   for the file of each figure the drafters that have a row in both of its tables
    """
    parts = re.split(r"^!\[.*\]\((.*)\)$", text, flags=re.M)
    return {file: read_curves(part) for file, part in zip(parts[1::2], parts[2::2])}


def read_curves(text: str) -> list[Curve]:
    """Read the two tables of a figure, of acceptance and of costs."""
    head, cells = [], {}
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if row[:1] == ["drafter"]:
            head = row
        elif row and not row[0].startswith("---"):
            cells.setdefault(row[0], {}).update(zip(head, row))
    return [Curve(name, [float(own[f"guess {k}"]) for k in range(1, 1 + GUESSES)
                         if own[f"guess {k}"]],
                  float(own["a round costs"]), float(own["tokens a round"]), float(own["x AR"]))
            for name, own in cells.items() if "x AR" in own]


# ------------------------------------------------------------------------------- lines and letters

def write_svg(width: int, height: int, title: str, style: str, parts: list[str]) -> str:
    """Write a picture as SVG: its size, what a screen reader says of it, its CSS and its parts."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
            f"<style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n")


def write_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    """Write a line of text as SVG, whose letters stand on the height y."""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}'
            '</text>')


def find_style(name: str) -> tuple[str, str, str]:
    """Return the shape and the fill of a drafter's marks, and the dashes of its line."""
    group, place = next((i, names.index(name)) for i, names in enumerate(GROUPS.values())
                        if name in names)
    return SHAPES[group], FILLS[place], DASHES[place]


def draw_mark(name: str, x: float, y: float) -> str:
    """Draw the mark of a drafter at a point."""
    shape, fill, _ = find_style(name)
    mark = f'<path class="ink {fill}" d="M{x:.1f} {y:.1f}{shape}"/>'
    if fill == "dot":
        mark += f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>'
    return mark


def draw_line(*points: tuple[float, float], kind: str = "thin", dashes: str = "") -> str:
    """Draw a straight line from each point to the next."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" stroke-dasharray="{dashes}" d="M{path}"/>'


def draw_labels(labels: list[tuple], x: float, top: float, bottom: float) -> list[str]:
    """Draw a column of labels at x, each with a mark and a line that leads to its point.

    The labels are in the order of their points, and equally far from one another.

    labels   triples: the name of a drafter, the text of its label, and its point
    """
    labels, parts = sorted(labels, key=lambda label: label[2][1]), []
    for i, (name, text, point) in enumerate(labels):
        height = top + (i + 0.5) / len(labels) * (bottom - top)
        parts += [draw_line(point, (x - 28, height)), draw_mark(name, x - 14, height),
                  write_text(x, height + 6, text)]
    return parts


def draw_panel(curves: list[Curve], left: float, top: float, title: str) -> list[str]:
    """Draw the acceptance of the drafters of a group over the number of the guess."""
    def place(k: int, rate: float) -> tuple[float, float]:
        return left + (k - 1) / (GUESSES - 1) * PANEL, top + (1 - rate) * TALL
    parts = [write_text(left - 6, top - 20, title)]
    for tick in (0, 0.5, 1):
        parts += [draw_line(place(1, tick), place(GUESSES, tick), kind="grid"),
                  write_text(left - 12, place(1, tick)[1] + 6, f"{tick:g}", "end", "small")]
    for k in (1, 2, 4, 6, 8):
        parts.append(write_text(place(k, 0)[0], top + TALL + 24, str(k), "middle", "small"))
    parts.append(write_text(left + PANEL / 2, top + TALL + 48, "number of the guess", "middle",
                            "small"))
    ends = [place(len(curve.acceptance), curve.acceptance[-1]) for curve in curves]
    labels = [(curve.name, curve.name, end) for curve, end in zip(curves, ends)]
    parts += draw_labels(labels, left + PANEL + 46, top, top + TALL)
    for curve in curves:
        points = [place(k, rate) for k, rate in enumerate(curve.acceptance, 1)]
        parts += [draw_line(*points, kind="ink", dashes=find_style(curve.name)[2]),
                  *(draw_mark(curve.name, *point) for point in points)]
    return parts


def draw_plane(curves: list[Curve]) -> list[str]:
    """Draw the tokens of a round over what it costs, both on logarithmic scales."""
    left, top, right, bottom = PLANE
    most_cost = 1.12 * max(2.0, *(curve.cost for curve in curves))
    most_tokens = 1.12 * max(2.0, *(curve.tokens for curve in curves))

    def place(cost: float, tokens: float) -> tuple[float, float]:
        return (left + math.log(cost / LEAST) / math.log(most_cost / LEAST) * (right - left),
                bottom - math.log(tokens / LEAST) / math.log(most_tokens / LEAST) * (bottom - top))
    parts = [f'<path class="thin" d="M{left} {top}V{bottom}H{right}"/>',
             write_text(left - 60, 28, "What a round costs, and what it gives", kind="head"),
             f'<g transform="translate({left - 52} {(top + bottom) / 2}) rotate(-90)">',
             write_text(0, 0, "tokens a round", "middle", "small"), "</g>",
             write_text((left + right) / 2, bottom + 52, "cost of a round, in rounds of AR",
                        "middle", "small"),
             write_text(left - 60, 52, "on the line: as fast as AR; 2×: twice as fast",
                        kind="small")]
    for tick in TICKS:
        if tick < most_cost:
            parts.append(write_text(place(tick, 1)[0], bottom + 24, f"{tick:g}", "middle", "small"))
        if tick < most_tokens:
            parts.append(write_text(left - 10, place(1, tick)[1] + 6, f"{tick:g}", "end", "small"))
    for speed in SPEEDS:
        first, last = max(LEAST, LEAST / speed), min(most_cost, most_tokens / speed)
        if first * 1.05 < last < most_cost:  # its name stands above the plane
            x, y = place(last, last * speed)
            parts += [draw_line(place(first, first * speed), (x, y), dashes="3 5"),
                      write_text(x, y - 8, f"{speed:g}×", "middle", "small")]
    most = min(most_cost, most_tokens)
    parts.append(draw_line(place(LEAST, LEAST), place(most, most), kind="ink"))
    labels = [(curve.name, f"{curve.name} {curve.speed:.2f}×", place(curve.cost, curve.tokens))
              for curve in curves]
    parts += draw_labels(labels, right + 60, top, bottom)
    return [*parts, *(draw_mark(name, *point) for name, _, point in labels)]


def draw_figure(curves: list[Curve]) -> str:
    """Draw the figure of some drafters as an SVG picture.

    A drafter whose acceptance is not known is left out.
    """
    known = [curve for curve in curves if curve.acceptance]
    if not known:
        raise InputError("expected drafters with enough rounds for a picture, got none")
    parts = [write_text(60, 28, "How often a guess is right, if those before it were",
                        kind="head")]
    for (title, names), (left, top) in zip(GROUPS.items(), PANELS):
        parts += draw_panel([curve for curve in known if curve.name in names], left, top, title)
    parts += draw_plane(known)
    return write_svg(WIDTH, HEIGHT, "Who guesses best, and what a guess costs", STYLE, parts)


def main() -> None:
    Parser(description=__doc__.partition("\n")[0]).parse_args()
    for file, curves in read_figures(PAGE.read_text(encoding="utf-8")).items():
        write_file(PAGE.with_name(file), draw_figure(curves))


if __name__ == "__main__":
    sys.exit(run_script(main))
