"""This file lets `python -m cli NAME …` run any method file, as ouroboros, eagle or hybrid."""
import importlib
import sys
from pathlib import Path

from cli.commands import main
from cli.main import run_script
from common import InputError

ROOT = Path(__file__).resolve().parent.parent


def list_files() -> dict[str, str]:
    """List the method files as {name: module}, such as {"eagle": "survey.eagle"}."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("survey/*.py"), ROOT / "hybrid/hybrid.py"]
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(files)}
    return {file.stem: ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for file, text in texts.items() if "\nCOMMAND_LINE = " in text}


def run(argv: list[str]) -> int:
    """Run the command line of the file that the first argument names."""
    modules, name = list_files(), "".join(argv[:1])
    if name not in modules:
        raise InputError(f"expected `python -m cli NAME`, with a NAME of {', '.join(modules)}, got "
                         f"{name!r}")
    return main(argv[1:], **importlib.import_module(modules[name]).COMMAND_LINE)


if __name__ == "__main__":
    sys.exit(run_script(lambda: run(sys.argv[1:])))
