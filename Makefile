# Radix. `make serve` and `make test` set up everything they need in .venv, from a clean clone with Python 3.10+, a C++
# compiler and make. TORCH names the torch to install; on a machine without a GPU TORCH_INDEX may name a pip index of
# CPU builds, which spares gigabytes.
PYTHON ?= python3
JOBS ?= 2
BACKEND ?= cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := $(CURDIR)/.venv
RUN := $(VENV)/bin/python
KERNEL_SOURCES := $(shell find kernel cmake tools CMakeLists.txt pyproject_cpu.toml -type f \
    -not -name '*.pyc' -not -name '*.so' -not -name '_build.json' 2>/dev/null)
# Tests see what is installed, not the source tree.
PYTEST := $(RUN) -m pytest -o pythonpath=. -p no:cacheprovider

.PHONY: install serve test test-full test-old-torch lint bench dev wheel

install: $(VENV)/.installed

$(VENV)/.installed: $(VENV)/.packages $(KERNEL_SOURCES)
	$(RUN) tools/build_wheel.py cpu --jobs $(JOBS)
	$(RUN) -m pip install -q --force-reinstall --no-deps dist/radix_kernels_cpu-*.whl
	touch $@

$(VENV)/.packages: runtime/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	$(RUN) -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	$(RUN) -m pip install -q scikit-build-core pybind11 cmake ninja
	$(RUN) -m pip install -q -e ./runtime
	touch $@

# The embedded model on port 30000; ARGS="--port 8000 ..." adds flags.
serve: install
	$(VENV)/bin/radix serve $(ARGS)

$(VENV)/.test-packages: $(VENV)/.packages
	$(RUN) -m pip install -q -e './runtime[test]' $(if $(findstring triton,$(REQUIRE)),triton)
	touch $@

lint: $(VENV)/.test-packages
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy kernel/python/radix_kernels runtime/radix_runtime
	git ls-files '*.cpp' '*.h' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run -Werror

test: install $(VENV)/.test-packages lint
	$(PYTEST) -q tests

# Whole products of options where `test` takes a cover of them.
test-full: install $(VENV)/.test-packages lint
	RADIX_TEST_FULL=1 $(PYTEST) -q tests

# The op tests under a torch without DLPack's exchange API: the system's Python and torch.
OLD_PYTHON ?= /usr/bin/python3
test-old-torch: install
	rm -rf build/old-torch
	$(OLD_PYTHON) -m venv --system-site-packages --without-pip build/old-torch
	$(RUN) -m pip install -q --no-deps --target build/old-torch/site dist/radix_kernels_cpu-*.whl
	PYTHONPATH=build/old-torch/site:. build/old-torch/bin/python tests/kernel/old_torch.py

bench: install
	$(RUN) -m bench.kernels all
	$(VENV)/bin/radix bench offline

# For work on the kernels: builds the library and the binding into kernel/python/radix_kernels, so that
# PYTHONPATH=kernel/python works without installing. ONLY="norm;rope" builds just those families (CPU) into a folder of
# their own and prints the PYTHONPATH to use.
dev: $(VENV)/.packages
	PYTHON=$(RUN) JOBS=$(JOBS) BACKEND=$(BACKEND) ONLY="$(ONLY)" tools/dev_build.sh

# dist/radix_kernels_<backend>-<version>-py3-none-manylinux_*.whl. PYTHONS="/path/python3.10 ..." puts a binding for
# each of them into the one wheel.
wheel: $(VENV)/.packages
	$(RUN) tools/build_wheel.py $(BACKEND) --jobs $(JOBS) $(if $(PYTHONS),--pythons $(PYTHONS))

# install: .venv with torch, the kernel wheel of BACKEND built from this tree, and the runtime (editable).
# TORCH says which torch; the default for the CPU is the build without CUDA libraries.
TORCH ?= $(if $(filter cpu,$(BACKEND)),--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu,torch)
INSTALLED := .venv/.installed-$(BACKEND)
KERNEL_SOURCES := $(shell find CMakeLists.txt cmake kernel -type f \
	! -name '*.so' ! -name '*.pyc' ! -name _build.json ! -path '*/lib/*' 2>/dev/null)

install: $(INSTALLED)

$(INSTALLED): $(KERNEL_SOURCES) pyproject_$(BACKEND).toml runtime/pyproject.toml
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install -q $(TORCH) scikit-build-core pybind11 cmake ninja
	$(MAKE) wheel PYTHON=$(CURDIR)/.venv/bin/python
	.venv/bin/python -m pip install -q --force-reinstall --no-deps dist/radix_kernels_$(BACKEND)-*.whl
	.venv/bin/python -m pip install -q -e runtime
	touch $@

# serve: installs what is missing and serves the embedded demo model (or MODEL) on port 30000; ARGS are further flags.
serve: install
	.venv/bin/radix serve $(MODEL) $(ARGS)
