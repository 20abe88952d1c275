# The first of these commands that you run makes .venv and installs what the project needs:
#
#   make demo       watch tokens being guessed and verified, on the embedded models
#   make test       check that every method is exact
#   make bench      measure every method on this machine, beside transformers' generate
#   make mutants    check that the tests notice mistakes in the code
#   make gpu        test and measure on a GPU: is it exact there, and how fast
#   make models     train the embedded models anew (two hours). The commands that train the parts of
#                   single methods are in models/README.md
#   make clean      remove .venv and all that trainings have kept
#
# Another Python than python3: make demo PYTHON=python3.12
PYTHON ?= python3
RUN := .venv/bin/python
# Many containers set this. Then each process compiles all of torch and transformers anew, for 8 s.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(RUN) -m pip install --no-compile --quiet --disable-pip-version-check

.PHONY: demo test mutants bench gpu models clean

demo: .venv/ready
	$(RUN) -m cli speculative --show --compare

# Two processes, one on each of two cores, run the tests from both ends until they meet.
test: .venv/ready
	@folder=$$(mktemp -d); run="$(RUN) -m pytest -q tests --share $$folder"; \
	$$run --backwards > $$folder/log 2>&1 & other=$$!; trap "kill $$other" INT; \
	$$run; first=$$?; \
	wait $$other; second=$$?; cat $$folder/log; rm -r $$folder; exit $$((first + second))

# All mutants take half an hour. Some of them: make mutants ONLY="survey/rest.py 12"
mutants: .venv/ready
	$(RUN) tests/mutants.py $(ONLY)

bench: .venv/ready
	$(RUN) results/bench.py

# With the Python that has torch for the GPU already: no .venv is made. The tests that enumerate all
# samples are left out, since they make very many calls.
gpu:
	$(PYTHON) -m pytest -q --device cuda tests/test_lossless.py -k "not law"
	$(PYTHON) -m pytest -q -m cuda tests/test_graphs.py tests/test_invariant.py
	$(PYTHON) results/bench.py --device cuda --graphs --dtype float32 -n 1 --rounds 2
	$(PYTHON) results/bench.py --device cuda --graphs --dtype bfloat16 -n 1 --rounds 2

models: .venv/ready
	$(RUN) models/train.py

# Without a GPU the small build of PyTorch comes first. On Linux pip's own index has one for CUDA,
# which takes 4 GB more. It is used if the small one cannot be reached.
.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	command -v nvidia-smi > /dev/null || $(PIP) --no-deps --retries 1 $$(grep ^torch= \
		requirements.txt) --extra-index-url https://download.pytorch.org/whl/cpu
	$(PIP) -r requirements.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache models/work __pycache__ */__pycache__
