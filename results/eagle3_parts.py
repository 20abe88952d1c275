"""Measure what each part of EAGLE-3 brings, and draw how guesses fare as more features are guessed.

    python results/eagle3_parts.py --adapters FOLDER --picture results/eagle3.svg

FOLDER holds trained drafts of EAGLE and of survey/eagle3.py, in a file for each name of VARIANTS.
A draft whose file is not there is left out. All must have been trained on the same answers, for
equally many steps or equally long. Prompts are those of bench.py. Only tokens per call are
measured, which no other work of the machine changes.
"""
import copy
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from bench import Bench, ROOT, options, perform, table

sys.path.insert(0, str(ROOT))
from common import InputError, autoregressive  # noqa: E402  (the path is set above)
from survey import eagle as eagle_file, eagle3 as eagle3_file  # noqa: E402


class Variant(NamedTuple):
    """Say how a draft is shown."""
    label: str  # its name in tables and pictures
    dash: str  # the dashes of its curve, as SVG has them
    mark: str  # at each point of the curve, one of MARKS


VARIANTS = {  # by the name of the file
    "eagle": Variant("EAGLE", "", "square"),
    "eagle_released": Variant("EAGLE, released form", "2 4", "black diamond"),
    "one_pass": Variant("one tapped layer, 1 pass", "2 4", "circle"),
    "three_passes": Variant("one tapped layer, 3 passes", "9 5", "triangle"),
    "five_passes": Variant("one tapped layer, 5 passes", "9 4 2 4", "diamond"),
    "three_layers": Variant("EAGLE-3, three tapped layers", "9 5", "black circle"),
    "norms": Variant("EAGLE-3.1, with norms", "", "black square"),
    "mtp": Variant("MTP", "9 4 2 4", "cross"),
}
MARKS = {  # each is drawn from the curve's point on
    "square": "m-5 -5h10v10h-10z",
    "circle": "m-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z",
    "triangle": "m0 -7l6.5 11h-13z",
    "diamond": "m0 -7l7 7l-7 7l-7 -7z",
    "cross": "m-5.5 -5.5l11 11m0 -11l-11 11",
}


def load_variants(bench: Bench) -> dict[str, tuple]:
    """Return for each variant whose file is there its method and its draft."""
    found = {}
    for name in VARIANTS:
        path = bench.args.adapters / f"{name}.safetensors"
        file = eagle_file if name.startswith("eagle") else eagle3_file
        if path.exists():
            method = file.eagle if file is eagle_file else file.eagle3
            found[name] = (method, file.load_draft(path, bench.target))
    if not found:
        raise InputError(f"--adapters must hold {', '.join(VARIANTS)}, got {bench.args.adapters}")
    return found


def make_chain(draft):
    """Copy a draft so that its trees are chains, since each node has one guess."""
    chain = copy.copy(draft)
    chain.accept = [ranks[:1] for ranks in draft.accept]
    return chain


def table_variants(bench: Bench) -> None:
    """Print the acceptance of each variant by depth, and what its chain and trees make of it."""
    variants = load_variants(bench)
    runs = {"AR": bench.ours(autoregressive)}
    for name, (method, draft) in variants.items():
        runs[name, "chain"] = bench.ours(method, trained=make_chain(draft), nodes=7)
        runs[name, "static"] = bench.ours(method, trained=draft, nodes=16)
        runs[name, "dynamic"] = bench.ours(method, trained=draft, nodes=16, dynamic=True)
    results = bench.measure(runs)
    depths = max(len(draft.accept) for _, draft in variants.values())
    rows = [["draft", *(f"{n}-α" for n in range(depths)), "tokens per call, chain of 6",
             "tree of 16", "dynamic tree of 16", "output as AR's"]]
    for name, (_, draft) in variants.items():
        rows.append([VARIANTS[name].label, *(f"{ranks[0]:.2f}" for ranks in draft.accept),
                     *(f"{results.per_call((name, kind)):.2f}"
                       for kind in ("chain", "static", "dynamic")),
                     results.same((name, "static"), "AR")])
    print(table(rows))
    if bench.args.picture:
        curves = {name: [ranks[0] for ranks in draft.accept]
                  for name, (_, draft) in variants.items()}
        bench.args.picture.write_text(draw_curves(curves), encoding="utf-8")


def draw_curve(variant: Variant, points: list[tuple[float, float]]) -> str:
    """Draw a line through points, with the marks of a variant."""
    kind = variant.mark.removeprefix("black ")
    fill = "white" if variant.mark == kind else "black"
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = "".join(f"M{x:.1f} {y:.1f}{MARKS[kind]}" for x, y in points)
    return (f'<g stroke="black" stroke-width="1.6"><polyline points="{line}" fill="none" '
            f'stroke-dasharray="{variant.dash}"/><path d="{marks}" fill="{fill}"/></g>')


def draw_curves(curves: dict[str, list[float]]) -> str:
    """Draw acceptance over the number of guessed features as an SVG picture in black and white.

    curves  for each name of VARIANTS its acceptance after 0, 1, 2, … guessed features
    """
    width, height, left, low, right = 1000, 480, 90, 410, 580
    most = max(map(len, curves.values())) - 1
    least = min(min(line) for line in curves.values()) // 0.1 * 0.1

    def place(n: int, alpha: float) -> tuple[float, float]:
        return left + n / most * (right - left), low - (alpha - least) / (1 - least) * (low - 30)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="19"><rect width="100%" height="100%" '
             'fill="white"/>']
    for n in range(most + 1):
        parts.append(f'<text x="{place(n, 0)[0]:.0f}" y="{low + 26}" text-anchor="middle">{n}'
                     '</text>')
    for tick in range(round(10 * least), 11):
        y = place(0, tick / 10)[1]
        parts.append(f'<text x="{left - 12}" y="{y + 6:.0f}" text-anchor="end">{tick / 10:.1f}'
                     f'</text><path d="M{left} {y:.1f}H{right}" stroke="#ccc"/>')
    parts.append(f'<text x="{(left + right) / 2}" y="{low + 56}" text-anchor="middle">how many '
                 'features are guessed</text><text x="28" y="220" text-anchor="middle" '
                 'transform="rotate(-90 28 220)">share of right guesses</text>')
    # Names stand in the order of the curves' ends, so that no line is needed between them.
    order = sorted(curves, key=lambda name: -curves[name][-1])
    for name, line in curves.items():
        y = 60 + 50 * order.index(name)
        points = [place(n, alpha) for n, alpha in enumerate(line)]
        for some in (points, [(right + 40, y), (right + 90, y)]):
            parts.append(draw_curve(VARIANTS[name], some))
        parts.append(f'<text x="{right + 104}" y="{y + 6}">{escape(VARIANTS[name].label)}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the SVG file to draw")
    perform(parser, table_variants)


if __name__ == "__main__":
    main()
