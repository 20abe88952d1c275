"""Write a page on which sliders say what a faster machine or a better draft would change.

    make cost                                  # five methods on the embedded models: costs.html
    python results/cost_page.py --target DIR --adapters FOLDER --prompts FILE --chat --out FILE

Each method decodes the prompts with the largest tree, and once more at its defaults, where the
clock of this machine chooses the tree. The first run says what each smaller tree is worth
(cli/costs.py). After each run calls of every width are timed. The pages of --trace have the same
panel for one run.
"""
import re
import sys
from pathlib import Path

from bench import AR, Bench, Ours, keep_fitting, open_bench, parser_of, run_script  # sets the path
from cli.costs import describe, write_panel
from cli.trace import PAGE, Trace
from support.files import write_text

WIDEST = 64  # rows of the largest trees, which the first runs have
LONGEST = 12  # tokens of the longest drafts


def record(ours: Ours, prompts: list[list[int]]) -> Trace:
    """Decode prompts and record the calls, after a first prompt that warms up.

    returns   the trace, with a table of what calls take
    """
    ours(prompts[0])
    ours.new_round()
    trace = Trace()
    for prompt in prompts:
        run = ours.start_run()
        list(trace.watch(run, prompt, run.decode(prompt, ours.limit, ours.sample)))
    trace.time_calls()
    return trace


def collect(bench: Bench) -> list[dict]:
    """Record those of five methods whose files fit the target.

    returns   what the panel shows of each
    """
    prompts = [prompt for _, prompt in bench.pairs]
    ar = record(bench.row(AR), prompts).runs

    def describe_method(line: str) -> dict:
        largest = f"--gamma {LONGEST}" if "--gamma" in line else f"--nodes {WIDEST}"
        tried = record(bench.row(f"{line} {largest}"), prompts)
        own = record(bench.row(line), prompts)
        return describe(line.split()[0], own.runs, tried.table, ar, tried.runs)
    lines = ["speculative --gamma 6", "medusa", "eagle", "rest", "hybrid --guess eagle"]
    return [*keep_fitting(lines, describe_method).values()]


def write_page(entries: list[dict]) -> str:
    """Write the page, in the style of --trace's pages."""
    head = re.search(r"^.*?</style>\n", PAGE.read_text(encoding="utf-8"), re.S)[0]
    head = re.sub("<title>.*?</title>", "<title>Five methods on one machine</title>", head)
    return (f"{head}<h1>Five methods on one machine</h1>\n{write_panel(entries)}"
            "<noscript>This page is drawn by a script inside it.</noscript>\n"
            "</html>\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("costs.html"), help="the page")
    parser.set_defaults(n=3, max_new_tokens=100)
    bench = open_bench(parser)
    write_text(bench.args.out, write_page(collect(bench)))
    print(bench.args.out.resolve())


if __name__ == "__main__":
    sys.exit(run_script(main))
