"""List the rows of single pages, for `python results/bench.py --table NAME`.

Every row is a command line without `python`, and AR is beside them. What the rows of a page do not
say, such as prompts and rounds, are options of bench.py.
"""

NODES = (4, 8, 16, 32, 64)
WARM = "--temperature 1 --top-p 0.8"
OFF = "--no-phrases --no-lengthen --no-verification"  # Ouroboros' mechanisms

TABLES = {
    "speculative": [f"speculative --gamma {n}" for n in (1, 2, 4, 6, 8)] + [
        "speculative --gamma 6 --verification token"],
    "ouroboros": [f"ouroboros {OFF}", f"ouroboros {OFF} --phrases",
                  f"ouroboros {OFF} --phrases --lengthen", "ouroboros",
                  *(f"ouroboros --K {k}" for k in (1, 2, 3, 5, 8)),
                  *(f"{x} {WARM}" for x in ("autoregressive", "speculative", "ouroboros"))],
    "bita": ["bita", "bita --tree chain", *(f"bita --tree {tree} --k {k}" for tree, k in (
        ("efficient", 1), ("efficient", 3), ("efficient", 5), ("full", 1), ("full", 2),
        ("full", 4)))],
    "mjsd": ["speculative --temperature 1", *(f"mjsd --gamma {n}" for n in (2, 4, 6)),
             *(f"mjsd --tau {x}" for x in (0.1, 0.5, 0.9)), "mjgd"],
    "medusa": [f"medusa --heads {kind} --nodes {n}" for kind in ("medusa", "hydra") for n in NODES]
    + [f"medusa --heads hydra --nodes 31 --temperature 0.7 {how}"
       for how in ("--no-typical", "--typical")],
    "eagle": [f"eagle --nodes {n} {how}" for how in ("--no-dynamic", "--dynamic") for n in NODES],
    "eagle3": [f"eagle3 --nodes {n} {how}" for how in ("--no-dynamic", "--dynamic")
               for n in NODES],
    "dflash": [f"dflash --nodes {n}" for n in NODES],
    "sequoia": [f"sequoia --nodes {n}" for n in NODES],
    "rest": [f"rest --nodes {n} {how}" for how in ("--grow", "--no-grow") for n in NODES]
    + [f"rest --alpha {x}" for x in (1, 2, 4)] + ["prompt_lookup"],
    "recycling": [f"recycling --nodes {n}" for n in NODES],
    "masks": [f"pass_sampling --L {n}" for n in (1, 2, 3, 4, 5)] + [
        f"space --k {n}" for n in (0, 1, 2, 3)],
    "layerskip": ["early_exit", "draft_verify", "draft_verify --no-adaptive",
                  *(f"layerskip --gamma {n}" for n in (3, 6, 9))],
    "cascade": [f"cascade --gamma {g} --inner {i} --tail {t}" for g, i, t in (
        (5, 0, 0), (5, 3, 0), (5, 0, 3), (5, 3, 3), (3, 3, 3), (8, 4, 4), (0, 0, 5))],
    "lossy": [f"specdec --beta {n}" for n in (1, 2, 3)] + [
        f"bild --fallback {x}" for x in (0.3, 0.6, 0.9)],
    "several_drafts": [f"{name} --gamma {g} --K {k} --temperature {t}"
                       for name in ("specinfer", "spectr")
                       for g, k in ((5, 2), (3, 4)) for t in (0, 1)],
    "hybrid": ["rest", *(f"hybrid --guess {guess}" for guess in (
        "none", "medusa", "hydra", "eagle", "eagle3", "dflash"))],
}
