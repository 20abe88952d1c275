"""List the rows of single pages, for `python results/bench.py --table NAME`.

Every row is a command line without `python`, and AR is beside them. Prompts, rounds and all else
that is the same for the rows of a page are options of bench.py.
"""


def vary(line: str, option: str, *values: float) -> list[str]:
    """Return a command line with each of these values of an option."""
    return [f"{line} --{option} {value}" for value in values]


def vary_nodes(*lines: str) -> list[str]:
    """Return command lines with trees of several sizes."""
    return [row for line in lines for row in vary(line, "nodes", 4, 8, 16, 32, 64)]


OFF = "ouroboros --no-phrases --no-lengthen --no-verification"  # without Ouroboros' mechanisms

TABLES = {
    "speculative": vary("speculative", "gamma", 1, 2, 4, 6, 8),
    "ouroboros": [OFF, f"{OFF} --phrases", f"{OFF} --phrases --lengthen", "ouroboros",
                  *vary("ouroboros", "K", 1, 2, 3, 5, 8)],
    "bita": ["bita", "bita --tree chain", *vary("bita --tree efficient", "k", 1, 3, 5),
             *vary("bita --tree full", "k", 1, 2, 4)],
    "mjsd": [*vary("mjsd", "gamma", 2, 4, 6), *vary("mjsd", "tau", 0.1, 0.5, 0.9), "mjgd"],
    "medusa": vary_nodes("medusa", "medusa --heads hydra"),
    "eagle": vary_nodes("eagle"),
    "eagle3": vary_nodes("eagle3"),
    "dflash": vary_nodes("dflash"),
    "sequoia": vary_nodes("sequoia"),
    "rest": [*vary_nodes("rest", "rest --no-grow"), *vary("rest", "alpha", 1, 2, 4)],
    "recycling": vary_nodes("recycling"),
    "masks": [*vary("pass_sampling", "L", 1, 2, 3, 4, 5), *vary("space", "k", 0, 1, 2, 3)],
    "layerskip": ["early_exit", "draft_verify --no-adaptive", *vary("layerskip", "gamma", 3, 6, 9)],
    "cascade": [f"cascade --gamma {g} --inner {i} --tail {t}" for g, i, t in (
        (5, 0, 0), (5, 3, 0), (5, 0, 3), (5, 3, 3), (3, 3, 3), (8, 4, 4), (0, 0, 5))],
    "lossy": [*vary("specdec", "beta", 1, 2, 3), *vary("bild", "fallback", 0.3, 0.6, 0.9)],
    "several_drafts": [*vary("specinfer", "K", 1, 2, 4), *vary("spectr", "K", 1, 2, 4)],
}
