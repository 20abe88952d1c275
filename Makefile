# make demo: watch tokens being drafted and verified;  make test: check that it is exact;  make bench: how fast it is here.
# Whichever comes first makes .venv. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: demo test bench models bita cllm clean

demo: .venv/ready
	$(RUN) speculative.py --show --compare

test: .venv/ready
	@PART=0 $(RUN) -m pytest -q tests > .half.log 2>&1 & half=$$!; PART=1 $(RUN) -m pytest -q tests; second=$$?; \
	wait $$half; first=$$?; cat .half.log; rm .half.log; exit $$((first + second))  # two halves at once

bench: .venv/ready
	$(RUN) tests/bench.py

models: .venv/ready
	$(RUN) models/train.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# models/bita.safetensors: the target's own answers to generated prompts, then tuning; a stopped run goes on
bita: .venv/ready
	mkdir -p models/work
	$(RUN) models/tasks.py 2000 > models/work/prompts.jsonl
	$(RUN) bita.py train --prompts models/work/prompts.jsonl --work models/work/bita --steps 300 --out models/bita.safetensors

# models/cllm: Jacobi trajectories of the target on generated prompts, then consistency training in two phases; a stopped run goes on
cllm: .venv/ready
	mkdir -p models/work
	$(RUN) models/tasks.py 1300 > models/work/prompts_cllm.jsonl
	($(RUN) models/tasks.py 1000 -3; $(RUN) models/tasks.py 2000 -4 math) > models/work/prompts_cllm_2.jsonl
	$(RUN) cllm.py collect --prompts models/work/prompts_cllm.jsonl --out models/work/trajectories.jsonl
	$(RUN) cllm.py collect --prompts models/work/prompts_cllm_2.jsonl --out models/work/trajectories_2.jsonl --batch 64
	$(RUN) cllm.py train --data models/work/trajectories.jsonl --steps 1500 --out models/work/cllm
	$(RUN) cllm.py train --target models/work/cllm --data models/work/trajectories_2.jsonl --steps 700 --w 50 --lr 1e-4 --work models/work/cllm.work2 --out models/cllm

clean:
	rm -rf .venv .pytest_cache models/work __pycache__ */__pycache__
