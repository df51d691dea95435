# Two commands: `make run` from nothing to text, `make test` from nothing to a green suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.cu')
# Byte code is written when a module is first imported: compiling all of PyTorch takes longer than installing it.
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile --no-warn-conflicts -c constraints.txt
# And also where an environment says not to write it: else every process compiles PyTorch again, which takes it 3 s.
unexport PYTHONDONTWRITEBYTECODE
# Packages are installed while the native module is built.
MAKEFLAGS += --jobs=2
# Where another build of PyTorch is, such as the small one for CPUs alone: make run TORCH_INDEX=ADDRESS. See README.md.
TORCH_INDEX ?=

.PHONY: run run-ray test suite test-all test-gpu test-rdma test-amx soak check lint types docs native stubs venv dev clean

run: venv
	$(BIN)/lamina generate --compute cpu:1 --memory cpu:2 --max-tokens 48 --temperature 0.7 --seed 3 \
		"def fibonacci(n):" "class Stack:" "def read(self, size=-1):" "for key, value in"

# The same on a Ray cluster of three nodes on this machine, one of which is removed while text is generated.
run-ray: venv
	$(BIN)/python tools/requirements.py ray > $(VENV)/.ray.txt
	$(PIP) --quiet -r $(VENV)/.ray.txt
	$(BIN)/python tools/run_ray.py

# More tests at once than a small machine has cores: for half of their time they wait for processes that they have started.
PYTEST = $(BIN)/pytest -rs -n 4 --dist loadfile --no-loadscope-reorder

# Types are checked beside the suite, which leaves a core idle now and then.
test: types suite

suite: lint
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST) --hypothesis-profile=thorough

# On a machine with an NVIDIA GPU; elsewhere every test says why it is skipped. Where a GPU is lent for minutes, a part at
# a time: make test-gpu GPU_TESTS=tests/gpu/test_polling_on_gpu.py
GPU_TESTS ?= tests/gpu
test-gpu: dev $(if $(shell command -v nvidia-smi),$(VENV)/.cuda)
	TRITON_INTERPRET=0 $(BIN)/pytest -rs -m "not slow" $(GPU_TESTS)

# Every small message and every gigabyte between two processes checked, over tcp and shm: make soak MESSAGES=1000 GIGABYTES=1
MESSAGES ?= 10000000
GIGABYTES ?= 100
soak: dev
	$(BIN)/python -m tests.transport.soak --messages $(MESSAGES) --gigabytes $(GIGABYTES)

# The runtime over RDMA and over networks that lose packets, and the transport's conformance suite over RDMA, in a virtual
# machine with Soft-RoCE. Status 77: skipped, with the reason.
test-rdma: dev
	tests/rdma/run.sh

# Products and attention by matrix tiles (AMX), on this processor or an emulated one. Status 77: skipped, with the reason.
test-amx: dev
	tests/amx/run.sh

check: lint types

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

types: dev
	$(BIN)/mypy

# The documentation site, in build/site. A broken link, also to a heading or a file, is an error.
docs: dev
	$(PIP) mkdocs mkdocs-material "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

venv: $(VENV)/.packages $(VENV)/.native

dev: $(VENV)/.dev venv

$(BIN)/pip:
	@command -v c++ >/dev/null || { echo "error: no C++ compiler. Install one (Debian: apt-get install g++) and run again."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: python3 -m venv failed. Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/.packages: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing PyTorch and other packages into $(VENV) (2.8 GB; 0.2 GB with TORCH_INDEX, see README.md) ..."
	$(BIN)/python tools/requirements.py > $@.txt
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $@.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.packages
	@echo "Installing development packages ..."
	$(BIN)/python tools/requirements.py dev > $@.txt
	$(PIP) --quiet -r $@.txt
	@touch $@

$(VENV)/.cuda: $(VENV)/.packages
	@echo "Installing packages for NVIDIA GPUs ..."
	$(BIN)/python tools/requirements.py cuda > $@.txt
	$(PIP) --quiet -r $@.txt
	@touch $@

$(VENV)/.tools: constraints.txt | $(BIN)/pip
	$(PIP) --quiet scikit-build-core nanobind cmake ninja
	@touch $@

# Without MAKEFLAGS, from which ninja would take two jobs for its limit.
$(VENV)/.native: $(VENV)/.tools pyproject.toml CMakeLists.txt $(CPP)
	@echo "Building Lamina ..."
	env -u MAKEFLAGS $(PIP) --quiet --quiet --no-build-isolation --no-deps -e .
	@touch $@

# Rebuild the native module alone, after a change under native/.
native: $(VENV)/.tools
	$(PIP) --quiet --quiet --no-build-isolation --no-deps -e .
	@touch $(VENV)/.native

# Write lamina/_native.pyi again, after `make native` changed the functions or their documentation.
stubs:
	$(BIN)/python native/stubs.py

clean:
	rm -rf $(VENV) build dist
