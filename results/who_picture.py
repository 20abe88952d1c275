"""Draw the figure of who_guesses.py: acceptance by position, and tokens against cost.

Four small panels have the acceptance of each guess, a group of drafters each. A fifth has what the
best chain of each drafter makes of it. Groups differ by the shape of their marks, and the drafters
of a group by the fill of the marks and by the dashes of the lines, so the figure needs no colour.
"""
import itertools
import math
from html import escape
from typing import Callable, NamedTuple

STYLE = """
svg { background: #ffffff; font: 19px system-ui, "Segoe UI", Arial, sans-serif; }
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
WIDTH, HEIGHT = 1280, 740
SIZE = 19  # of the letters
SHAPES = ("square", "circle", "triangle", "diamond")  # by group
FILLS = ("empty", "full", "half", "empty", "full")  # by the place within a group
DASHES = ("", "9 5", "2 4", "12 4 2 4", "5 3")
PANELS = ((56, 84), (450, 84), (56, 436), (450, 436))  # left and top of the small panels
PANEL, TALL, GUESSES = 160, 230, 8  # width and height of a small panel, and the guesses it shows
PLANE = (820, 84, 1200, 666)  # left, top, right and bottom of the large panel
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SPEEDS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6)
LEAST = 0.8  # the smallest cost and the fewest tokens of the plane

Box = tuple[float, float, float, float]  # left, top, right, bottom


class Curve(NamedTuple):
    """Hold what is drawn of a drafter.

    group        the number of its group
    acceptance   of its first, second, … guess
    point        what a round of its best chain costs, and the tokens that the round gives
    """
    name: str
    group: int
    acceptance: list[float]
    point: tuple[float, float]


def write_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    """Write a line of text as SVG, whose letters stand on the height y."""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}'
            '</text>')


def draw_mark(shape: str, fill: str, x: float, y: float) -> str:
    """Draw a mark of one of SHAPES at a point."""
    style = f'class="ink {fill}" style="stroke-dasharray:none"'
    if shape == "square":
        return f'<rect x="{x - 5.5:.1f}" y="{y - 5.5:.1f}" width="11" height="11" {style}/>'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {style}/>'
    if shape == "triangle":
        return f'<path d="M{x:.1f} {y - 7:.1f}l7 12h-14z" {style}/>'
    return f'<path d="M{x:.1f} {y - 8:.1f}l7 8l-7 8l-7 -8z" {style}/>'


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
    parts = [write_text(left - 6, top - 20, title, kind="head")]
    for tick in (0, 0.5, 1):
        y = place(1, tick)[1]
        parts += [f'<path class="grid" d="M{left:.1f} {y:.1f}h{PANEL}"/>',
                  write_text(left - 12, y + 6, f"{tick:g}", "end", "small")]
    for k in (1, 2, 4, 6, 8):
        parts.append(write_text(place(k, 0)[0], top + TALL + 24, str(k), "middle", "small"))
    ends = [place(len(curve.acceptance), curve.acceptance[-1]) for curve in curves]
    heights = spread([y for _, y in ends], SIZE + 3, top + 4, top + TALL - 2)
    for i, (curve, end, height) in enumerate(zip(curves, ends, heights)):
        points = [place(k, rate) for k, rate in enumerate(curve.acceptance, 1)]
        label = left + PANEL + 28
        parts += [f'<path class="thin" d="M{end[0] + 8:.1f} {end[1]:.1f}L{label - 18} {height:.1f}'
                  f'h14"/>',
                  f'<polyline class="ink" stroke-dasharray="{DASHES[i]}" points="'
                  + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>',
                  *(draw_mark(SHAPES[curve.group], FILLS[i], x, y) for x, y in points),
                  write_text(label, height + 6, curve.name)]
    return parts


def bound_text(x: float, y: float, text: str, anchor: str) -> Box:
    """Return a box that holds a line of text, which is estimated from above.

    The arguments are those of `write_text`.
    """
    width = 0.58 * SIZE * len(text)
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    return left, y - 15, left + width, y + 5


def overlap(one: Box, other: Box) -> bool:
    """Tell whether two boxes have a point in common."""
    return (one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3])


def find_place(x: float, y: float, text: str, taken: list[Box], within: Box) -> tuple[float, float]:
    """Find a free place for a label near a point.

    taken    boxes that the label must not touch
    within   the box in which it must lie
    returns  the point in the middle under the label's letters, for the free place that is the
             nearest to the given point. If none is free, the point itself
    """
    left, top, right, bottom = bound_text(0, 0, text, "middle")
    for distance in range(11, 400, 6):
        for turn in range(16):
            angle = turn * math.pi / 8
            # The label's middle stands farther away the longer the label reaches in this direction.
            middle = (x + math.cos(angle) * (distance + right),
                      y + math.sin(angle) * (distance + (bottom - top) / 2) - (top + bottom) / 2)
            box = bound_text(*middle, text, "middle")
            inside = (within[0] <= box[0] and within[1] <= box[1] and box[2] <= within[2]
                      and box[3] <= within[3])
            if inside and not any(overlap(box, other) for other in taken):
                return middle
    return x, y


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
             write_text(left - 36, 28, "tokens a round", kind="head"),
             write_text(WIDTH - 10, 28, "dashed: equal speed", "end", "small"),
             write_text(right, bottom + 52, "cost of a round, in rounds of AR", "end", "head")]
    for tick in TICKS:
        if tick < most[0]:
            parts.append(write_text(place(tick, 1)[0], bottom + 24, f"{tick:g}", "middle", "small"))
        if tick < most[1]:
            parts.append(write_text(left - 10, place(1, tick)[1] + 6, f"{tick:g}", "end", "small"))
    return parts


def draw_plane(curves: list[Curve], marks: dict[str, str]) -> list[str]:
    """Draw the tokens of a round over what it costs, both on logarithmic scales.

    marks   the fill of each drafter's marks
    """
    left, top, right, bottom = PLANE
    most = (1.12 * max(2.0, *(curve.point[0] for curve in curves)),
            1.12 * max(2.0, *(curve.point[1] for curve in curves)))

    def place(cost: float, tokens: float) -> tuple[float, float]:
        return (left + math.log(cost / LEAST) / math.log(most[0] / LEAST) * (right - left),
                bottom - math.log(tokens / LEAST) / math.log(most[1] / LEAST) * (bottom - top))
    parts, taken = draw_axes(place, most), []
    for speed, (x, y), (end, high), label in name_speeds(place, most):
        kind, dash = ("ink", "") if speed == 1 else ("thin", "3 5")
        parts += [f'<path class="{kind}" stroke-dasharray="{dash}" d="M{x:.1f} {y:.1f}'
                  f'L{end:.1f} {high:.1f}"/>', write_text(*label, "small")]
        taken.append(bound_text(*label))
    points = {curve.name: place(*curve.point) for curve in curves}
    taken += [(x - 11, y - 10, x + 11, y + 10) for x, y in points.values()]
    words = []
    for curve in sorted(curves, key=lambda curve: -curve.point[1]):
        x, y = points[curve.name]
        label = (*find_place(x, y, curve.name, taken, (left + 4, top, WIDTH - 4, bottom - 4)),
                 curve.name, "middle")
        box = bound_text(*label)
        taken.append(box)
        near = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        parts.append(f'<path class="thin" d="M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}"/>')
        words.append(write_text(*label, "over"))
    return [*parts, *words, *(draw_mark(SHAPES[curve.group], marks[curve.name],
                                        *points[curve.name]) for curve in curves)]


def draw_figure(curves: list[Curve], titles: tuple[str, ...]) -> str:
    """Draw the figure as an SVG picture.

    curves   the drafters
    titles   the names of the groups
    """
    parts, marks = [], {}
    for group, (title, (left, top)) in enumerate(zip(titles, PANELS)):
        some = [curve for curve in curves if curve.group == group and curve.acceptance]
        marks |= {curve.name: fill for curve, fill in zip(some, itertools.cycle(FILLS))}
        parts += draw_panel(some, left, top, title)
    parts += [write_text(50, 28, "how often guess 1, 2, … is right, where those before it were",
                         kind="small"),
              *draw_plane([curve for curve in curves if curve.name in marks], marks)]
    words = "Who guesses best, and what a guess costs"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">\n<title>{words}</title>\n'
            f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n")
