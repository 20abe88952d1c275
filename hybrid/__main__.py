"""This file lets `python -m hybrid` run the command line of hybrid.py."""
import runpy

runpy.run_module("hybrid.hybrid", run_name="__main__")
