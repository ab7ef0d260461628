# Radix. Every target works from a clean clone; PYTHON names the interpreter (default: the project's .venv).
PYTHON ?= $(if $(wildcard .venv/bin/python),$(CURDIR)/.venv/bin/python,python3)
JOBS ?= 2
BACKEND ?= cpu

.PHONY: dev wheel

# dev: builds the library and the binding and puts them into kernel/python/radix_kernels, so that
# PYTHONPATH=kernel/python works without installing. ONLY="norm;rope" builds just those families (CPU) into a folder of
# their own and prints the PYTHONPATH to use.
dev:
	PYTHON=$(PYTHON) JOBS=$(JOBS) BACKEND=$(BACKEND) ONLY="$(ONLY)" tools/dev_build.sh

# wheel: dist/radix_kernels_<backend>-<version>-py3-none-manylinux_*.whl. PYTHONS="/path/python3.10 ..." puts a binding
# for each of them into the one wheel.
wheel:
	$(PYTHON) tools/build_wheel.py $(BACKEND) --jobs $(JOBS) $(if $(PYTHONS),--pythons $(PYTHONS))
