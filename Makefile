# make demo: watch tokens being drafted and verified;  make test: check that it is exact;  make bench: how fast it is here.
# Whichever comes first makes .venv. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: demo test bench models clean

demo: .venv/ready
	$(RUN) speculative.py --show --compare

test: .venv/ready
	$(RUN) -m pytest -q tests

bench: .venv/ready
	$(RUN) tests/bench.py

models: .venv/ready
	$(RUN) models/train.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache models/work __pycache__ */__pycache__
