"""Draw the figure of who_guesses.py: acceptance by position, and tokens against cost.

    python results/who_picture.py       # both figures of who_guesses.md, from the page's tables

Four small panels have the acceptance of each guess, a group of drafters each. A fifth has what the
best chain of each drafter makes of it. Groups differ by the shape of their marks, and the drafters
of a group by the fill of the marks and by the dashes of the lines, so the figure needs no colour.
A drafter has the same mark in all figures.
"""
import argparse
import math
import re
import sys
from html import escape
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from cli.main import run_script  # noqa: E402  (the path is set above)
from common import InputError  # noqa: E402
from training.files import write_text as write_file  # noqa: E402

STYLE = """
svg { background: #ffffff; font: 20px system-ui, "Segoe UI", Arial, sans-serif; }
text { fill: #1f2328; } .small { fill: #59636e; } .head { font-weight: 600; }
.ink { stroke: #1f2328; fill: none; stroke-width: 2; }
.thin { stroke: #8c959f; fill: none; stroke-width: 1; }
.grid { stroke: #d8dee4; fill: none; stroke-width: 1; }
.over { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }
.full { fill: #1f2328; } .half { fill: #a8b1bb; } .empty { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #f0f6fc; } .small { fill: #9198a1; }
  .ink { stroke: #f0f6fc; } .thin { stroke: #6e7681; } .grid { stroke: #2a313c; }
  .over { stroke: #0d1117; }
  .full { fill: #f0f6fc; } .half { fill: #6e7681; } .empty { fill: #0d1117; }
}
"""
GROUPS = {"a model's call for each guess": ("small model", "early exit", "Draft & Verify",
                                            "distilled"),
          "a small layer for each guess": ("EAGLE", "EAGLE-3", "Hydra", "MTP"),
          "all guesses at once": ("Medusa", "DFlash", "BiTA", "PaSS"),
          "guesses that are looked up": ("n-grams", "REST", "recycling", "hybrid")}
SHAPES = ("square", "circle", "triangle", "diamond")  # by group
FILLS = ("empty", "full", "half", "dot")  # by the place within a group
DASHES = ("", "9 5", "2 4", "12 4 2 4")
PAGE = Path(__file__).with_name("who_guesses.md")
WIDTH, HEIGHT = 1320, 740
SIZE = 20  # of the letters, as in STYLE
PANELS = ((66, 84), (470, 84), (66, 436), (470, 436))  # left and top of the small panels
PANEL, TALL, GUESSES = 150, 230, 8  # width and height of a small panel, and the guesses it shows
PLANE = (850, 84, 1236, 666)  # left, top, right and bottom of the large panel
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SPEEDS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6)
LEAST = 0.8  # the smallest cost and the fewest tokens of the plane

Box = tuple[float, float, float, float]  # left, top, right, bottom


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
    style, dot = f'class="ink {fill}"', ""
    if fill == "dot":
        style = 'class="ink empty"'
        dot = f'<circle class="full" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>'
    if shape == "square":
        return f'<rect x="{x - 6.5:.1f}" y="{y - 6.5:.1f}" width="13" height="13" {style}/>{dot}'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" {style}/>{dot}'
    if shape == "triangle":
        return f'<path d="M{x:.1f} {y - 9.5:.1f}l9 15h-18z" {style}/>{dot}'
    return f'<path d="M{x:.1f} {y - 9:.1f}l9 9l-9 9l-9 -9z" {style}/>{dot}'


def spread(heights: list[float], gap: float, top: float, bottom: float) -> list[float]:
    """Move heights apart, so that neighbours are `gap` apart and all stay between top and bottom.

    returns  the moved heights, in the order of `heights`
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, least = {}, top
    for i in order:
        moved[i] = max(heights[i], least)
        least = moved[i] + gap
    most = bottom
    for i in reversed(order):
        moved[i] = min(moved[i], most)
        most = moved[i] - gap
    return [moved[i] for i in range(len(heights))]


def draw_panel(curves: list[Curve], left: float, top: float, title: str) -> list[str]:
    """Draw the acceptance of the drafters of a group over the number of the guess."""
    def place(k: int, rate: float) -> tuple[float, float]:
        return left + (k - 1) / (GUESSES - 1) * PANEL, top + (1 - rate) * TALL
    parts = [write_text(left - 6, top - 20, title)]
    for tick in (0, 0.5, 1):
        y = place(1, tick)[1]
        parts += [f'<path class="grid" d="M{left:.1f} {y:.1f}h{PANEL}"/>',
                  write_text(left - 12, y + 6, f"{tick:g}", "end", "small")]
    for k in (1, 2, 4, 6, 8):
        parts.append(write_text(place(k, 0)[0], top + TALL + 24, str(k), "middle", "small"))
    parts.append(write_text(left + PANEL / 2, top + TALL + 48, "number of the guess", "middle",
                            "small"))
    ends = [place(len(curve.acceptance), curve.acceptance[-1]) for curve in curves]
    heights = spread([y for _, y in ends], SIZE + 3, top + 4, top + TALL - 2)
    label = left + PANEL + 46
    for curve, end, height in zip(curves, ends, heights):
        points = [place(k, rate) for k, rate in enumerate(curve.acceptance, 1)]
        parts += [f'<path class="thin" d="M{end[0]:.1f} {end[1]:.1f}L{label - 28} {height:.1f}'
                  'h14"/>',
                  f'<polyline class="ink" stroke-dasharray="{find_style(curve.name)[2]}" points="'
                  + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>',
                  *(draw_mark(curve.name, x, y) for x, y in points),
                  draw_mark(curve.name, label - 14, height),
                  write_text(label, height + 6, curve.name)]
    return parts


def bound_text(x: float, y: float, text: str, anchor: str) -> Box:
    """Return a box that holds a line of text, which is estimated from above.

    The arguments are those of `write_text`.
    """
    width = 0.63 * SIZE * len(text)
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    return left, y - 15, left + width, y + 5


def overlap(one: Box, other: Box) -> bool:
    """Tell whether two boxes have a point in common."""
    return (one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3])


def find_lead(x: float, y: float, box: Box) -> tuple[float, float]:
    """Find the point of a label's box that is the nearest to (x, y), to which a thin line leads."""
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


def hits(start: tuple[float, float], end: tuple[float, float], boxes: list[Box]) -> bool:
    """Tell whether the straight line from start to end runs through a box.

    A box at its start, as that of a drafter's own mark, does not count. The line may touch the
    outermost three units of a box.
    """
    others = [(left + 3, top + 3, right - 3, bottom - 3) for left, top, right, bottom in boxes
              if not overlap((*start, *start), (left, top, right, bottom))]
    points = [(start[0] + i / 20 * (end[0] - start[0]), start[1] + i / 20 * (end[1] - start[1]))
              for i in range(21)]
    return any(overlap((*point, *point), box) for point in points for box in others)


def find_place(x: float, y: float, text: str, taken: list[Box], within: Box) -> tuple[float, float]:
    """Find a free place for a label near a point.

    taken    boxes that the label must not touch. Nor does the thin line to it touch them, if any
             free place allows that
    within   the box in which the label must lie
    returns  the point in the middle under the label's letters, for the free place that is the
             nearest to the given point. If none is free, the point itself
    """
    free = []
    for middle in list_places(x, y, text):
        box = bound_text(*middle, text, "middle")
        inside = (within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2]
                  and box[3] <= within[3])
        if inside and not any(overlap(box, other) for other in taken):
            free.append(middle)
            if not hits((x, y), find_lead(x, y, box), taken):
                return middle
    return free[0] if free else (x, y)


def list_places(x: float, y: float, text: str) -> Iterator[tuple[float, float]]:
    """Yield the places around a point that a label may have, the nearest first."""
    left, top, right, bottom = bound_text(0, 0, text, "middle")
    for distance in range(12, 400, 6):
        for turn in range(16):
            angle = turn * math.pi / 8
            # The label's middle stands farther away the longer the label reaches in this direction.
            yield (x + math.cos(angle) * (distance + right),
                   y + math.sin(angle) * (distance + (bottom - top) / 2) - (top + bottom) / 2)


def name_speeds(place: Callable, most: tuple[float, float]) -> list[tuple]:
    """Find the lines of equal speed, and where their names stand, outside the plane.

    place     a function of a cost and a number of tokens that gives a point of the picture
    most      the largest cost and the most tokens of the plane
    returns   for each line (speed, its first point, its last point, arguments of `write_text`)
    """
    found = []
    for speed in SPEEDS:
        first = max(LEAST, LEAST / speed)
        last = min(most[0], most[1] / speed)
        if last <= first * 1.05:
            continue
        x, y = place(last, last * speed)
        name = "1× AR" if speed == 1 else f"{speed:g}×"
        label = (x, y - 8, name, "middle")
        if last == most[0]:
            label = (x + 8, y + 6, name, "start")
        found.append((speed, place(first, first * speed), (x, y), label))
    return found


def draw_axes(place: Callable, most: tuple[float, float]) -> list[str]:
    """Draw the axes of the plane and their numbers. The arguments are those of `name_speeds`."""
    left, top, right, bottom = PLANE
    parts = [f'<path class="thin" d="M{left} {top}V{bottom}H{right}"/>',
             write_text(left - 60, 28, "What a round costs, and what it gives", kind="head"),
             write_text(left - 60, 52, "2×: twice as fast as AR; dotted: equal speed",
                        kind="small"),
             f'<g transform="translate({left - 52} {(top + bottom) / 2}) rotate(-90)">',
             write_text(0, 0, "tokens a round", "middle", "small"), "</g>",
             write_text((left + right) / 2, bottom + 52, "cost of a round, in rounds of AR",
                        "middle", "small")]
    for tick in TICKS:
        if tick < most[0]:
            parts.append(write_text(place(tick, 1)[0], bottom + 24, f"{tick:g}", "middle", "small"))
        if tick < most[1]:
            parts.append(write_text(left - 10, place(1, tick)[1] + 6, f"{tick:g}", "end", "small"))
    return parts


def draw_plane(curves: list[Curve]) -> list[str]:
    """Draw the tokens of a round over what it costs, both on logarithmic scales."""
    left, top, right, bottom = PLANE
    most = (1.12 * max(2.0, *(curve.cost for curve in curves)),
            1.12 * max(2.0, *(curve.tokens for curve in curves)))

    def place(cost: float, tokens: float) -> tuple[float, float]:
        return (left + math.log(cost / LEAST) / math.log(most[0] / LEAST) * (right - left),
                bottom - math.log(tokens / LEAST) / math.log(most[1] / LEAST) * (bottom - top))
    parts, taken = draw_axes(place, most), []
    for speed, (x, y), (end, high), label in name_speeds(place, most):
        kind, dash = ("ink", "") if speed == 1 else ("thin", "3 5")
        parts += [f'<path class="{kind}" stroke-dasharray="{dash}" d="M{x:.1f} {y:.1f}'
                  f'L{end:.1f} {high:.1f}"/>', write_text(*label, "small")]
        taken.append(bound_text(*label))
    points = {curve.name: place(curve.cost, curve.tokens) for curve in curves}
    taken += [(x - 12, y - 11, x + 12, y + 11) for x, y in points.values()]
    words, fastest = [], max(curves, key=lambda curve: curve.speed)
    for curve in sorted(curves, key=lambda curve: -curve.tokens):
        x, y = points[curve.name]
        text = f"{curve.name} {curve.speed:.2f}×"
        label = (*find_place(x, y, text, taken, (left + 4, top, WIDTH - 4, bottom - 4)), text,
                 "middle")
        box = bound_text(*label)
        taken.append(box)
        near = find_lead(x, y, box)
        parts.append(f'<path class="thin" d="M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}"/>')
        words.append(write_text(*label, "over head" if curve is fastest else "over"))
    return [*parts, *words, *(draw_mark(name, *point) for name, point in points.items())]


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
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file, curves in read_figures(PAGE.read_text(encoding="utf-8")).items():
        write_file(PAGE.with_name(file), draw_figure(curves))


if __name__ == "__main__":
    sys.exit(run_script(main))
