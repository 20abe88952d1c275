"""This folder is what cli/, survey/, hybrid/ and training/ share beyond common.py.

Its import comes before that of everything that another version of transformers lacks.
"""
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise SystemExit("expected transformers 5.23.0, as in requirements.txt, or 5.17 at least, got "
                     f"transformers {transformers.__version__}: pip install -r requirements.txt")
