# The first of these commands that you run makes .venv and installs what the project needs:
#
#   make demo       watch tokens being guessed and verified, on the embedded models
#   make test       check that every method is exact
#   make bench      measure every method on this machine, beside transformers' generate
#   make mutants    check that the tests notice mistakes in the code
#   make who        measure who guesses best and what a guess costs, and draw it
#   make picture    draw README's picture of a run on this machine
#   make gpu        measure on a GPU: is it exact there, and how fast (it takes six minutes)
#   make cost       write costs.html: what calls cost here, and what guesses bring
#   make models     train the embedded models anew; the commands from `bita` on train the parts of
#                   single methods (models/README.md says how long each takes)
#   make clean      remove .venv and all that trainings have kept
#
# Another Python than python3: make demo PYTHON=python3.12
PYTHON ?= python3
RUN := .venv/bin/python
WORK := models/work

.PHONY: demo test mutants bench who gpu gpu-dry models picture cost bita medusa \
	eagle eagle3 dflash layerskip masks sequoia rest hybrid cllm clean

demo: .venv/ready
	$(RUN) speculative.py --show --compare

# Two halves of the tests run at once, one on each of two cores.
test: .venv/ready
	@PART=0/2 $(RUN) -m pytest -q tests > .half.log 2>&1 & half=$$!; \
	PART=1/2 $(RUN) -m pytest -q tests; second=$$?; \
	wait $$half; first=$$?; cat .half.log; rm .half.log; exit $$((first + second))

# All mutants take hours. Some of them: make mutants ONLY="survey/rest.py 12"
mutants: .venv/ready
	$(RUN) tests/mutants.py $(ONLY)

bench: .venv/ready
	$(RUN) results/bench.py

# Makes results/who_guesses.svg. What was measured is kept, but for the costs, which come last.
who: .venv/ready
	$(RUN) results/who_guesses.py -n 16 --time-again --picture results/who_guesses.svg

# With the Python that has torch for the GPU already: no .venv is made. It writes results/gpu.json.
gpu:
	$(PYTHON) results/gpu.py

# How much each method would ask of a GPU: launches, waits, copies. It needs no GPU, and minutes
gpu-dry: .venv/ready
	$(RUN) results/gpu_dry.py

models: .venv/ready
	$(RUN) models/train.py

# Makes .github/decode.svg.
picture: .venv/ready
	$(RUN) results/picture.py

# README's screenshots: .github/costs.png is this page at --window-size=1600,690, and trace.png at
# 1200,610 is a page of speculative.py --compare --trace (chromium --headless --screenshot=FILE.png)
cost: .venv/ready
	$(RUN) results/cost_page.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --no-compile --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# Each command below first lets the target answer generated prompts, then trains or counts a part.
# If a training is stopped, the same command goes on from there.

# models/bita.safetensors: prompt and mask tokens
bita: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 2000 > $(WORK)/prompts.jsonl
	$(RUN) bita.py train --prompts $(WORK)/prompts.jsonl --work $(WORK)/bita --steps 300 \
		--out models/bita.safetensors

# models/medusa.safetensors and models/hydra.safetensors: heads
medusa: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_medusa.jsonl
	for heads in medusa hydra; do $(RUN) -m survey.medusa train --heads $$heads --steps 2000 \
		--prompts $(WORK)/prompts_medusa.jsonl --work $(WORK)/medusa \
		--out models/$$heads.safetensors || exit; done

# models/eagle.safetensors: a draft layer
eagle: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_eagle.jsonl
	$(RUN) -m survey.eagle train --prompts $(WORK)/prompts_eagle.jsonl --work $(WORK)/eagle \
		--steps 1000 --begin last --lr 3e-3 --out models/eagle.safetensors

# models/eagle3.safetensors: a draft layer that reads three layers of the target
eagle3: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_eagle.jsonl
	$(RUN) -m survey.eagle3 train --prompts $(WORK)/prompts_eagle.jsonl --work $(WORK)/eagle \
		--steps 1000 --lr 3e-3 --out models/eagle3.safetensors

# models/dflash.safetensors: a draft that guesses a block of eight tokens in one pass
dflash: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_eagle.jsonl
	$(RUN) -m survey.dflash train --prompts $(WORK)/prompts_eagle.jsonl --work $(WORK)/eagle \
		--taps 2,6,11 --steps 1200 --out models/dflash.safetensors

# models/pass.safetensors: look-ahead tokens; models/space.safetensors: changes of the target
masks: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_masks.jsonl
	$(RUN) -m survey.masks train --prompts $(WORK)/prompts_masks.jsonl --work $(WORK)/masks \
		--L 5 --out models/pass.safetensors
	$(RUN) -m survey.masks tune --prompts $(WORK)/prompts_masks.jsonl --work $(WORK)/masks \
		--batch 16 --out models/space.safetensors

# models/exit.safetensors: an early exit for the frozen target; models/layerskip.safetensors:
# low-rank changes of it; models/blocks.json: which of its blocks Draft & Verify skips
layerskip: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 700 > $(WORK)/prompts_exit.jsonl
	$(RUN) -m survey.early_exit train --prompts $(WORK)/prompts_exit.jsonl \
		--work $(WORK)/layerskip --out models/exit.safetensors
	$(RUN) -m survey.layerskip tune --prompts $(WORK)/prompts_exit.jsonl \
		--work $(WORK)/layerskip --out models/layerskip.safetensors
	$(RUN) models/tasks.py 20 > $(WORK)/prompts_blocks.jsonl
	$(RUN) -m survey.draft_verify search --prompts $(WORK)/prompts_blocks.jsonl \
		--out models/blocks.json

# models/hybrid.json: how far n-grams and trained parts are to be trusted, on answers that neither
# has seen
hybrid: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 30 -5 > $(WORK)/prompts_hybrid.jsonl
	$(RUN) -m survey.hybrid fit --prompts $(WORK)/prompts_hybrid.jsonl --work $(WORK)/hybrid \
		--out models/hybrid.json

# models/cllm: Jacobi trajectories on generated prompts, then consistency training in two phases
cllm: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 1300 > $(WORK)/prompts_cllm.jsonl
	$(RUN) models/tasks.py 1000 -3 > $(WORK)/prompts_cllm_2.jsonl
	$(RUN) models/tasks.py 2000 -4 math >> $(WORK)/prompts_cllm_2.jsonl
	$(RUN) cllm.py collect --target models/target --prompts $(WORK)/prompts_cllm.jsonl \
		--out $(WORK)/trajectories.jsonl
	$(RUN) cllm.py collect --target models/target --prompts $(WORK)/prompts_cllm_2.jsonl --batch 64 \
		--out $(WORK)/trajectories_2.jsonl
	$(RUN) cllm.py train --target models/target --data $(WORK)/trajectories.jsonl --steps 1500 \
		--batch 16 --lr 5e-4 --out $(WORK)/cllm
	$(RUN) cllm.py train --target $(WORK)/cllm --data $(WORK)/trajectories_2.jsonl --steps 700 \
		--batch 16 --w 50 --lr 1e-4 --work $(WORK)/cllm.work2 --out models/cllm

# models/rest.safetensors: a datastore of the target's answers
rest: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 2000 > $(WORK)/prompts.jsonl
	$(RUN) -m survey.rest build --prompts $(WORK)/prompts.jsonl --work $(WORK)/rest \
		--out models/rest.safetensors

# models/sequoia.json: how often the draft's first, second, … child is the accepted one
sequoia: .venv/ready
	mkdir -p $(WORK)
	$(RUN) models/tasks.py 40 > $(WORK)/prompts_sequoia.jsonl
	$(RUN) -m survey.sequoia calibrate --prompts $(WORK)/prompts_sequoia.jsonl \
		--out models/sequoia.json

clean:
	rm -rf .venv .pytest_cache models/work __pycache__ */__pycache__
