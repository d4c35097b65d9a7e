# make demo          train a small network on JPEG files with stock PyTorch and with torch_sink, side by side
# make test          the test-suite; make test-oldest: on the oldest supported releases; make test-oldest-core: their core
# make test-core     what depends on the Python and the torch it runs on, and the kernels compiled: PYTHON_CORE=python3.13
#                    TORCH=2.12 make test-core chooses both, in an environment of their own
# make test-slow     the soak tests
# make test-releases the whole suite on the oldest releases, the core on every other Python: before a change is done
# make test-clone    a bare clone runs: nothing installed, no .git, no home folder, no GPU
# make suites        the tests of torchvision, Pillow, PyTorch and torchdata, stock and with torch_sink: SUITES=folder has them,
#                    ONLY="torchvision Pillow:handles" runs some; writes docs/suites.md
# make rehearsal     all of make gpu in a bare clone on a fake CUDA device, in minutes
# make check         ruff and mypy
# make docs          the pages as a site, in local/site; warnings and dead links are errors
# make gpu           all that needs a GPU, in nine minutes; PART=tests|train|decode|..., RESULTS=folder, DATA=photographs
#                    TRIAL=1: try everything at sizes that mean nothing; this and PART=compile need no GPU
# make kernels       compile what changed of the kernels for every target, count what they execute; rewrites docs/inside/kernels.md
# make seen          run the long tests of kernels whole, and note that they pass: until something changes, make test runs few
# make report        write docs/performance.md and the figures of the README from the committed results
#
# Each target sets up what it needs. PYTHON=python3.12 make test chooses the interpreter of a new environment.

PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
PYTHON_CORE ?= $(PYTHON)
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_DEMO ?= $(if $(wildcard $(VENV)/.torch_sink_ready),$(VENV),.venv-demo)
# A release of torch, such as 2.12; the newest one that pip finds if it is empty.
TORCH ?=
VENV_CORE ?= .venv-core$(if $(TORCH),-torch-$(TORCH))
# Three test files at a time, on two cores: one of them often waits for time to pass.
# A test that takes ten minutes fails, and the others run. One that hangs in C, where no signal reaches it, prints its stack
# after half an hour and ends the run: xdist would begin it again and again.
PYTEST_FLAGS ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
    --timeout=600 --timeout-method=signal -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true
PART ?= all
TRIAL ?=
RESULTS ?= local/gpu
DATA ?=
DEMO_FLAGS ?=
SUITES ?= $(wildcard ../shared/data/suites)
ONLY ?=
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))

# Triton up to 3.6 interprets kernels with NumPy before 2.4 only; compiled kernels do not care.
OLDEST_RELEASES = torch==2.8.0 torchvision==0.23.0 triton==3.4.0 "numpy<2.4"

# Each of many processes would compile the package, and each that collects the tests would compile these.
unexport PYTHONDONTWRITEBYTECODE

ALL_EXTRAS = examples,test,third-party

# Where Pythons and releases of torch differ: references that are counted, frames, fork beside threads, exit; that all can
# be imported; and what Triton makes of the kernels.
CORE_TESTS = tests/kernels/test_compile.py tests/project/test_packaging.py tests/cli/test_cli.py tests/test_messages.py \
    tests/image/operations/test_arithmetic.py tests/image/core/test_fallback.py tests/image/handles/test_shared_memory.py \
    tests/image/operations/test_tensor_methods.py tests/image/handles/test_lazy_image.py \
    tests/sink/test_left_open.py tests/sink/test_loader.py tests/sink/test_own_iterators.py tests/sink/resume/test_resume.py \
    tests/loop/test_step_loop.py tests/loop/test_checkpoint.py

SEEN_TESTS = tests/kernels/test_compile.py tests/kernels/test_compiled.py tests/kernels/test_interpreted.py

.DEFAULT_GOAL := help
.PHONY: help setup setup-oldest setup-core demo test test-oldest test-oldest-core test-core test-releases test-slow \
    test-clone suites rehearsal check docs gpu kernels seen report clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# Rebuilt when the requirements change. An environment made by hand is kept: pip only adds what it lacks.
$(VENV)/.torch_sink_ready: pyproject.toml
	@.ci/make_environment "$(PYTHON)" "$(VENV)" $(ALL_EXTRAS)
$(VENV_OLDEST)/.torch_sink_ready: pyproject.toml
	@BARE=1 .ci/make_environment "$(PYTHON_OLDEST)" "$(VENV_OLDEST)" $(ALL_EXTRAS) $(OLDEST_RELEASES)
$(VENV_CORE)/.torch_sink_ready: pyproject.toml
	@BARE=1 .ci/make_environment "$(PYTHON_CORE)" "$(VENV_CORE)" examples,test $(if $(TORCH),torch==$(TORCH).*)

ifneq ($(VENV_DEMO),$(VENV))
$(VENV_DEMO)/.torch_sink_ready: pyproject.toml
	@BARE=1 BESIDE=1 .ci/make_environment "$(PYTHON)" "$(VENV_DEMO)" examples
endif

setup: $(VENV)/.torch_sink_ready
setup-oldest: $(VENV_OLDEST)/.torch_sink_ready
setup-core: $(VENV_CORE)/.torch_sink_ready

# In the environment of the tests where it is ready. Elsewhere beside the packages of PYTHON: a torch that is there is used.
demo: $(VENV_DEMO)/.torch_sink_ready
	$(VENV_DEMO)/bin/python examples/demo/demo.py $(DEMO_FLAGS)

test: setup
	$(VENV)/bin/python -m pytest -m "not slow and not once_on_oldest" $(PYTEST_FLAGS)

# Without what `make test-clone` runs.
test-oldest: setup-oldest
	$(VENV_OLDEST)/bin/python -m pytest -m "not slow and not once" $(PYTEST_FLAGS) --ignore=tests/project/test_clone.py

# Their core, and a clone that runs as it is.
test-oldest-core: setup-oldest
	$(VENV_OLDEST)/bin/python -m pytest -m "not slow and not once" $(PYTEST_FLAGS) $(CORE_TESTS) tests/project/test_clone.py

test-releases:
	.ci/run releases

test-core: setup-core
	$(VENV_CORE)/bin/python -m pytest -m "not slow and not once_on_oldest" $(PYTEST_FLAGS) $(CORE_TESTS)

test-slow: setup
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_FLAGS) -n 0 --timeout=0 -o faulthandler_timeout=0

test-clone: setup-oldest
	$(VENV_OLDEST)/bin/python -m pytest tests/project/test_clone.py

suites: setup
	$(VENV)/bin/python tests/suites/run.py $(if $(SUITES),--folder "$(SUITES)") $(if $(ONLY),--only $(ONLY))

# As on a GPU machine: the oldest releases beside NumPy's newest.
rehearsal: setup-oldest
	$(VENV_OLDEST)/bin/python -m pip install -q --disable-pip-version-check --upgrade --target local/numpy "numpy>=2.5"
	NEWER_PACKAGES="$(CURDIR)/local/numpy" $(VENV_OLDEST)/bin/python -m pytest -m slow tests/project/test_rehearsal.py

check: setup
	$(VENV)/bin/python -m pip install -q ruff mypy
	$(VENV)/bin/python -m ruff check torch_sink triton_kernels tests examples docs/made_by
	$(VENV)/bin/python -m ruff format --check --quiet torch_sink triton_kernels tests examples docs/made_by
	$(VENV)/bin/python -m mypy torch_sink
	$(VENV)/bin/python -m mypy --config-file= --strict --follow-imports=silent tests/user_project.py

docs: setup
	$(VENV)/bin/python -m pip install -q mkdocs-material "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

# Sets nothing up: a GPU machine often has its own PyTorch and no registry.
gpu:
	$(GPU_PYTHON) examples/benchmarks/gpu.py --part "$(PART)" --results "$(RESULTS)" $(if $(DATA),--data "$(DATA)") $(if $(TRIAL),--trial)

kernels: setup
	$(VENV)/bin/python examples/benchmarks/kernels.py
	$(VENV)/bin/python examples/benchmarks/kernel_counts.py
	$(VENV)/bin/python examples/benchmarks/report.py

# Without `make kernels` too: on the newest releases and on the oldest.
seen: setup setup-oldest
	RECORD_SEEN=1 $(VENV)/bin/python -m pytest -m "not slow and not once_on_oldest" $(SEEN_TESTS)
	RECORD_SEEN=1 $(VENV_OLDEST)/bin/python -m pytest -m "not slow and not once" $(SEEN_TESTS)

report: setup
	$(VENV)/bin/python examples/benchmarks/report.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache local
