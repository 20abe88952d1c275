"""Measure what each part of EAGLE-3 brings, and draw how guesses fare as more features are guessed.

    python results/eagle3_parts.py --adapters FOLDER --picture results/eagle3.svg

FOLDER holds trained drafts of EAGLE and of survey/eagle3.py, in a file for each name of VARIANTS.
A draft whose file is not there is left out. All must have been trained on the same answers for
equally many steps. Prompts are those of bench.py. Only tokens per call are measured, which no other
work of the machine changes.
"""
import copy
import sys
from html import escape
from pathlib import Path

from bench import Bench, ROOT, options, perform, table

sys.path.insert(0, str(ROOT))
from common import InputError, autoregressive  # noqa: E402  (the path is set above)
from survey import eagle as eagle_file, eagle3 as eagle3_file  # noqa: E402

VARIANTS = {  # file: what it is called in the table
    "eagle": "EAGLE",
    "one_pass": "one tapped layer, no loss on features",
    "three_passes": "the same, with the training-time test of 3 passes",
    "five_passes": "the same, with the training-time test of 5 passes",
    "three_layers": "EAGLE-3, 5 passes and three tapped layers",
    "norms": "EAGLE-3.1, the same with its norms",
    "mtp": "MTP, 3 passes",
}
DASHES = ("", "1 3", "6 3", "", "6 3", "1 3", "10 3 2 3")
MARKS = ("square", "circle", "circle", "circle", "filled", "filled", "cross")


def load_variants(bench: Bench) -> dict[str, tuple]:
    """Return for each variant whose file is there its method and its draft."""
    found = {}
    for name in VARIANTS:
        path = bench.args.adapters / f"{name}.safetensors"
        file = eagle_file if name == "eagle" else eagle3_file
        if path.exists():
            method = file.eagle if name == "eagle" else file.eagle3
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
        rows.append([VARIANTS[name], *(f"{ranks[0]:.2f}" for ranks in draft.accept),
                     *(f"{results.per_call((name, kind)):.2f}"
                       for kind in ("chain", "static", "dynamic")),
                     results.same((name, "static"), "AR")])
    print(table(rows))
    if bench.args.picture:
        curves = {VARIANTS[name]: [ranks[0] for ranks in draft.accept]
                  for name, (_, draft) in variants.items()}
        bench.args.picture.write_text(draw_curves(curves), encoding="utf-8")


def draw_mark(kind: str, x: float, y: float) -> str:
    """Draw a mark of one of four kinds at a point."""
    if kind == "square":
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" fill="white"/>'
    if kind == "cross":
        return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'
    fill = "black" if kind == "filled" else "white"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}"/>'


def draw_curves(curves: dict[str, list[float]]) -> str:
    """Draw acceptance over the number of guessed features as an SVG picture in black and white.

    curves  for each name its acceptance after 0, 1, 2, … guessed features
    """
    width, height, left, low, right = 840, 400, 60, 350, 430
    most = max(map(len, curves.values())) - 1
    least = min(min(line) for line in curves.values()) // 0.1 * 0.1

    def place(n: int, alpha: float) -> tuple[float, float]:
        return left + n / most * (right - left), low - (alpha - least) / (1 - least) * (low - 30)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
             'fill="white"/>']
    for n in range(most + 1):
        parts.append(f'<text x="{place(n, 0)[0]:.0f}" y="{low + 18}" text-anchor="middle">{n}'
                     '</text>')
    for tick in range(round(10 * least), 11):
        y = place(0, tick / 10)[1]
        parts.append(f'<text x="{left - 10}" y="{y + 4:.0f}" text-anchor="end">{tick / 10:.1f}'
                     f'</text><path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
    parts.append(f'<text x="{(left + right) / 2}" y="{low + 38}" text-anchor="middle">how many '
                 'features are guessed</text><text x="18" y="190" text-anchor="middle" '
                 'transform="rotate(-90 18 190)">share of right guesses</text>')
    # Names stand in the order of the curves' ends, so that no line is needed between them.
    order = sorted(curves, key=lambda name: -curves[name][-1])
    for name, dash, kind in zip(curves, DASHES, MARKS):
        points = [place(n, alpha) for n, alpha in enumerate(curves[name])]
        y = 60 + 40 * order.index(name)
        legend = [(right + 40, y), (right + 80, y)]
        for line in (points, legend):
            parts.append('<g fill="none" stroke="black"><polyline points="'
                         + " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
                         + f'" stroke-dasharray="{dash}"/>'
                         + "".join(draw_mark(kind, x, y) for x, y in line) + "</g>")
        head, _, tail = name.partition(", ")
        parts.append(f'<text x="{right + 92}" y="{y + 1}">{escape(head)}</text>'
                     f'<text x="{right + 92}" y="{y + 15}">{escape(tail)}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the SVG file to draw")
    perform(parser, table_variants)


if __name__ == "__main__":
    main()
