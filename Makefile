# Every target sets up what it needs in .venv; re-running is quick.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKLOAD ?= bench/workloads/smoke.jsonl
PEERS ?= .peers

.PHONY: help ready demo run test fuzz api-fuzz clients clients-openai clients-langchain clients-litellm clients-agents clients-anthropic clients-guidellm chaos bucket nodes sanitize lint docs protos bench bench-batches bench-peers bench-retrieval plots model mutants dev image-test clean

help:                   ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1  /p' $(MAKEFILE_LIST) | while read -r target does; do \
	  printf 'make %-17s %s\n' "$$target" "$$does"; done

ready: $(READY)         ## set up what the other targets need

demo: $(READY)          ## start everything, ask one question of the examples, show its way, stop
	$(BIN)/penstock demo

run: $(READY)           ## start everything and stay up until Ctrl-C
	$(BIN)/penstock up

# A process for each core and one more, each with a file at a time: tests/support/lanes.py.
test: $(READY)          ## all tests; ARGS="tests/unit -k breaker": some
	$(BIN)/python -m pytest --numprocesses auto --durations 20 $(ARGS)

# CI draws eight for each endpoint, in `make test`.
api-fuzz: $(READY)      ## 300 requests for each endpoint, drawn from the API's document, fitting ones and others (minutes)
	EXAMPLES=$(or $(REQUESTS),300) $(BIN)/python -m pytest tests/integration/test_openapi.py

# CI has time for the first ten seconds of it, in `make test`. REQUESTS=50000 SEED=7: that many, those again.
fuzz: $(READY)          ## 10,000 random requests with cancels and faults through the engine: each ends once, nothing is left
	$(BIN)/python -m tests.fuzz $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

# Each in an environment of its own below build/clients, with the versions of tests/clients/*.txt.
clients: $(READY)       ## OpenAI's client and Agents SDK, Anthropic's client, langchain-openai and litellm as they are against the demonstration model
	$(BIN)/python -m tests.clients.run

clients-openai:         ## OpenAI's client alone
clients-langchain:      ## langchain-openai alone
clients-litellm:        ## litellm alone
clients-agents:         ## OpenAI's Agents SDK alone
clients-anthropic:      ## Anthropic's client alone
clients-guidellm:       ## guidellm (some gigabytes; `make clients` leaves it out)
clients-openai clients-langchain clients-litellm clients-agents clients-anthropic clients-guidellm: clients-%: $(READY)
	$(BIN)/python -m tests.clients.run $*

chaos: $(READY)         ## one process of each class killed under 16 streams, or hung, and what that cost; everything replaced under load (half an hour)
	$(BIN)/python -m tests.chaos.kills
	$(BIN)/python -m tests.chaos.upgrade

# Its server has an environment of its own below build/.
bucket: $(READY)        ## uploaded files in a bucket: the blob store against moto's S3 server (a minute)
	test -x build/moto/bin/moto_server || { $(PYTHON) -m venv build/moto && \
	  build/moto/bin/pip install --quiet --disable-pip-version-check 'moto[s3,server]==5.2.5'; }
	MOTO_SERVER=build/moto/bin/moto_server $(BIN)/python -m pytest tests/integration/bucket.py

nodes: $(READY)         ## several Ray nodes on this machine, some killed under load (ten minutes)
	$(BIN)/python -m pytest tests/chaos/nodes.py tests/chaos/spread_ranks.py

# A write or read beyond an array ends the tests. Two minutes; needs g++ with its libasan.
sanitize: $(READY)      ## the C++ kernels' tests under the address sanitizer
	PENSTOCK_KERNELS_FLAGS="-fsanitize=address -fno-omit-frame-pointer" $(BIN)/python kernels/cpu/build.py
	PENSTOCK_KERNELS_FLAGS="-fsanitize=address -fno-omit-frame-pointer" ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so)" $(BIN)/python -m pytest tests/kernels -k cpu

lint: $(READY)          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)          ## generate docs/settings.md, docs/metrics.md, the dashboards and the chart's schema of settings from the code
	$(BIN)/python -m services.common.settings_doc
	$(BIN)/python -m services.metrics_doc
	$(BIN)/python -m deploy.observability.grafana.make_dashboards
	$(BIN)/python -m deploy.helm.settings_schema

# FILES="services/router/breaker.py" asks about one file: minutes. All of them take an hour.
mutants: $(READY)       ## small wrong changes, one at a time: the share that the tests catch, and what they miss
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[mutants]'
	nice $(BIN)/python -m tests.mutants $(FILES)

protos: $(READY)        ## generate the contracts' Python modules
	$(BIN)/python protos/generate.py

bench: $(READY)         ## the engine alone on a small workload, then the links
	mkdir -p build
	$(BIN)/penstock bench engine --model models/demo --workload $(WORKLOAD) --json build/engine.json
	$(BIN)/python -m bench.links

# Half an hour, and more than an hour the first time: llama.cpp is built. PEERS is where they are;
# ARGS="--models S --repetitions 1" and more: `python -m bench.peers --help`.
bench-peers: $(READY)   ## the engine beside vLLM, OpenVINO and llama.cpp in one run: bench/results/peers-DATE.md
	$(BIN)/python -m bench.peers --folder $(PEERS) $(ARGS)

bench-batches: $(READY) ## what a batch costs those who wait: times to the first token with one and without (three minutes)
	$(BIN)/python -m bench.batches $(ARGS)

# ARGS="speed --vectors 10000" and more: `python -m bench.retrieval --help`.
bench-retrieval: ARGS ?= quality
bench-retrieval: $(READY) ## what retrieval finds of 2,000 made-up questions; ARGS: what it costs
	$(BIN)/python -m bench.retrieval $(ARGS)

plots: $(READY)         ## draw docs/plots: cost of a token by batch and context, planning by waiting requests
	$(BIN)/python -m bench.sweep --model $(PEERS)/models/S-bf16 --plots docs/plots

# The allocator keeps its memory between steps: a tenth faster on a CPU.
model: $(READY)         ## remake the demonstration model from its seed (some seven hours on two cores)
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=268435456 \
	  $(BIN)/python -m models.recipe.make

# pip would compile one file after the other. Some are templates, no Python, and stay as they are.
# The editable install builds the contracts' modules; `protoc` runs again when a .proto changed.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard protos/*.proto) protos/generate.py \
  $(wildcard kernels/cpu/native/*) kernels/cpu/build.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "make: Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "installing; \"Building editable\" compiles the engine's kernels: some three minutes of CPU time, in which nothing is told"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
	  --constraint constraints.txt --editable '.[dev]'
	@echo "compiling the libraries' modules: up to three minutes, in which nothing is told"
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	$(BIN)/python protos/generate.py
	$(BIN)/python kernels/cpu/build.py
	touch $@

dev:                    ## the dev loop on Kubernetes: a cluster by kind, changed files into running pods
	@for tool in kind kubectl helm skaffold docker; do command -v $$tool > /dev/null \
	  || { echo "make dev needs $$tool"; exit 1; }; done
	kind get clusters | grep -qx penstock || kind create cluster --name penstock
	skaffold dev --kube-context kind-penstock $(ARGS)

# ARGS="--base MY_PYTHON --through-host" where registries of images cannot be reached.
image-test: $(READY)    ## build the CPU image, run it alone and as compose.yaml does; needs docker
	$(BIN)/python -m tests.deploy.image_run $(ARGS)

clean:                  ## remove what the targets made; .penstock/ (your data) stays
	rm -rf .venv build dist mutants *.egg-info protos/*_pb2*.py* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
