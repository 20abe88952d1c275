"""This file lets `python survey/medusa.py` do what `python -m survey.medusa` does.

Python looks for the modules of a file that is run by its path beside this file. So it finds this
file in place of the real common.py, which lies one folder higher, and this file makes way for it.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
del sys.modules["common"]  # this file itself
import common  # noqa: E402, F401  (the path is set above)
