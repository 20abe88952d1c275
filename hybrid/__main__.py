"""This file lets `python -m hybrid` run the command line of hybrid.py."""
from support.engine import run_as_program

run_as_program("hybrid")
