# The two commands that do everything on a fresh machine, and what CI runs.
#   make demo    install into .venv, then DGA against synchronous SGD: a table and a picture
#   make test    install into .venv with the test tools, then run the tests in which nothing is real: five
#                minutes, in a drawn order (the same again: make test SEED=12345); docs/reference/tests.md says when to run which
#   make test-real  real processes, emulated networks, images, deadlines that fit this machine: ten minutes
#   make test-examples  1,000 examples of each property (20 are in make test): at night
#   make test-costs  measure what each file of tests takes, into tests/costs.toml; TESTS="tests/cli" for some
#   make test-boot  flash a card, boot it under user-mode-linux, let it train (root, mmdebstrap)
#   make test-fleet  sixteen machines with a real sshd, ten of them in trouble (root, mmdebstrap)
#   make test-boot-qemu  the same under QEMU, which emulates a whole machine (also -arm64, -raspi3b)
#   make test-tc  what the kernel's own tc does, under user-mode-linux and QEMU: minutes (TESTS="-k words")
#   make test-versions  the oldest of every floor, and the newest of everything, each in build/versions: a table
#   make test-fresh  what a fresh install takes on ARM (emulated), and on Debian 13 and testing (root, mmdebstrap)
#   make test-trainers  loops of Accelerate, Lightning, transformers, Opacus, Ignite, skorch, installed into .venv-trainers
#   make test-zoo  models of transformers, timm, peft, torch_geometric in six ways: a table (.venv-zoo)
#   make test-trackers  TensorBoard, MLflow and W&B read back what they were given (.venv-trackers)
#   make findings  what packages of this field do against one's guess: each installs pinned ones of its own (findings/)
#   make test-notebook  interrupt a simulation in a notebook's kernel, at ten drawn moments (.venv-notebook)
#   make test-commands  run every long command of README, docs and --help, with its seconds (hours)
#   make test-damages  1,000 drawn damages of run folders, journals and key folders (60 are in make test)
#   make test-kills  kill 100 sends and updates of devices at random, and 100 over a real sshd (root)
#   make test-arm-doctor  what `doctor` says in a worker archive for a Raspberry Pi, emulated
#   make test-masks  300 drawn schedules of a masked job with too few members left (half an hour)
#   make test-groups  odd models and losses on 22 placements of two and four ranks (a quarter of an hour)
#   make test-endurance  a day of a fleet, a million messages, attackers: hours; TESTS="…" for some
#   make test-mutations  a million mutated payloads of codecs (2,000 are in make test): minutes
#   make chaos   crash hubs, cut power: is anything lost? SCHEDULES=1000, WORDS="job.toml --processes"
#   make test-dashboard  the dashboard in headless Chromium: how soon a message is painted, what it costs
#   make docs    the documentation as a site, into build/site; a dead link fails (.venv-docs)
#   make tables  write the tables of jobs.md and wire.md anew, from the code; meanings stay
#   make check   linters, types and make test's tests; TESTS="tests/cli" for some of them
#   make drawn   200 jobs with an automatic delay, drawn at random: does any diverge? (an hour)
# With TORCH_INDEX=URL torch comes from that index first: its build for CPUs, where there is no GPU (README).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Of pytest-xdist; on a busy machine more of them get a larger share of it.
WORKERS ?= 2
TRAINERS ?= .venv-trainers
TRACKERS ?= .venv-trackers
NOTEBOOK ?= .venv-notebook
ZOO ?= .venv-zoo
DOCS ?= .venv-docs
# Of the tests and of mypy, so that `make demo` and `make test` take one build; an install may have any from 2.6.
TORCH ?= torch>=2.6,<2.14

.PHONY: demo test test-real test-tc test-examples test-costs chaos test-damages test-trainers test-trackers test-notebook test-zoo test-kills test-boot test-fleet test-boot-qemu test-boot-qemu-arm64 test-boot-qemu-raspi3b test-arm-doctor test-commands test-masks test-groups test-endurance test-mutations test-dashboard test-versions test-fresh findings check drawn install-lab install-dev install-trainers install-trackers install-notebook install-zoo install-docs docs tables

demo: install-lab
	$(BIN)/edgetrain compare

# The workers share the processors, and what one has compiled: nobody else's folders get a __pycache__.
test test-real test-examples test-costs check: export OMP_NUM_THREADS ?= 1
test test-real test-examples test-costs check: export PYTHONPYCACHEPREFIX ?= $(abspath $(VENV))/pycache
test test-real test-examples test-costs check: export PYTHONDONTWRITEBYTECODE :=

# The same order in CI, each time.
test: SEED ?= $(if $(CI),,$(shell od -An -N2 -tu2 /dev/urandom))
test: install-dev
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --costs $(if $(SEED),--order $(strip $(SEED)))

test-real: install-dev
	$(BIN)/pytest -m real -n 3 --dist loadfile --costs $(WORDS) $(TESTS)

test-examples: install-dev
	EXAMPLES=1000 $(BIN)/pytest -m hypothesis -n 2 --dist loadfile --timeout 3600

test-costs: install-dev
	$(BIN)/pytest -n 2 --dist loadfile --write-costs $(TESTS)
	$(BIN)/pytest -m real -n 2 --dist loadfile --write-costs $(TESTS)

test-trainers: install-trainers
	$(TRAINERS)/bin/python -m pytest -m trainers -p no:cacheprovider tests/trainers

test-trackers: install-trackers
	$(TRACKERS)/bin/python -m pytest -m trackers -p no:cacheprovider tests/trackers

test-notebook: install-notebook
	$(NOTEBOOK)/bin/python -m pytest -m notebook -p no:cacheprovider tests/notebook

# WORDS="-k GPT" for some of them.
test-zoo: export OMP_NUM_THREADS ?= 1
test-zoo: install-zoo
	$(ZOO)/bin/python -m pytest -m zoo -s --show-capture=no --tb=line -p no:cacheprovider tests/training/servers/test_zoo.py tests/training/test_adapters.py $(WORDS)

test-versions:
	$(PYTHON) .ci/versions $(WORDS)

test-fresh:
	$(PYTHON) .ci/fresh $(WORDS)

findings:
	set -e; for each in findings/*.sh; do echo "$$each"; bash "$$each"; done

test-damages: install-dev
	DAMAGES=1000 $(BIN)/pytest tests/cli/test_damages.py

test-kills: install-dev
	KILLS=100 $(BIN)/pytest -m 'fleet or not fleet' -s tests/provisioning/test_desk.py tests/provisioning/test_fleet_kills.py -k killed

test-boot: install-dev
	$(BIN)/pytest -m boot tests/provisioning/cards

test-fleet: install-dev
	$(BIN)/pytest -m 'fleet or not fleet' -s tests/provisioning/test_fleet_ssh.py tests/provisioning/test_fleet_jobs.py tests/provisioning/test_fleet_desk.py

test-tc: install-dev build/kernel
	$(BIN)/pytest -m uml -rsP tests/fleet/networks/emulation/test_uml.py $(TESTS)

# Debian's kernel, unpacked and not installed.
build/kernel:
	mkdir -p $@.part && cd $@.part && apt-get download $$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p')
	dpkg -x $@.part/linux-image-*.deb $@.part && rm $@.part/*.deb && mv $@.part $@

test-boot-qemu: install-dev
	$(BIN)/pytest -m boot_qemu -rs -k amd64 tests/provisioning/cards

test-boot-qemu-arm64 test-boot-qemu-raspi3b: test-boot-qemu-%: install-dev
	$(BIN)/pytest -m boot_qemu -rs -k $* tests/provisioning/cards

test-commands: install-dev
	$(BIN)/pytest -m nightly -p no:cacheprovider tests/test_commands.py

chaos: install-dev
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m chaos $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(WORDS)

test-masks: install-dev
	$(BIN)/pytest -m masks -n 2 tests/exchange/masks/test_secure_chaos.py

test-arm-doctor: install-dev
	$(BIN)/pytest -m arm_doctor -rs --durations=1 tests/provisioning/cards

test-groups: install-dev
	$(BIN)/pytest -m groups tests/training/servers
	$(BIN)/pytest -m 'groups or not groups' tests/chaos/test_going_and_coming.py

test-endurance: install-dev
	$(BIN)/pytest -m endurance -p no:cacheprovider $(or $(TESTS),tests/endurance)

test-mutations: export MUTATIONS ?= 30000
test-mutations: install-dev
	$(BIN)/pytest -n 2 -rP --timeout 3600 tests/codecs/test_codec_payloads.py tests/exchange/test_fuzzed_frames.py -k mutated

test-dashboard: install-dev
	$(BIN)/python benchmarks/dashboard.py $(WORDS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --costs $(TESTS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "edgetrain needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@test -z "$(TORCH_INDEX)" || $(BIN)/pip install --quiet --index-url $(TORCH_INDEX) '$(TORCH)'

install-lab: $(BIN)/python
	@test -e $(BIN)/edgetrain || echo "installing torch and the rest into $(VENV): over 1 GB, minutes without a word ..."
	@$(BIN)/pip install --quiet --editable '.[lab]' '$(TORCH)'

install-dev: $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'

# Sees what is in $(VENV), so that torch stays the one that is there.
install-trainers install-trackers install-notebook install-zoo install-docs: install-dev
	@test -e $(BESIDE)/bin/pip || $(BIN)/python -m venv $(BESIDE)
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > $$($(BESIDE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/edgetrain.pth
	@$(BESIDE)/bin/pip install --quiet $(WANTS)
install-trainers: BESIDE = $(TRAINERS)
install-trainers: WANTS = accelerate==1.15.0 lightning==2.6.6 opacus==1.6.0 pytorch-ignite==0.5.5 skorch==1.4.0 transformers==5.23.0 torch
install-trackers: BESIDE = $(TRACKERS)
install-trackers: WANTS = tensorboard mlflow wandb torch
install-notebook: BESIDE = $(NOTEBOOK)
install-notebook: WANTS = ipykernel jupyter_client torch
# Locked by hashes: benchmarks/environments.py writes such a list.
install-zoo: BESIDE = $(ZOO)
install-zoo: WANTS = --no-deps --require-hashes --requirement tests/training/servers/zoo.txt
install-docs: BESIDE = $(DOCS)
install-docs: WANTS = zensical==0.0.73 mkdocstrings-python==2.0.11 torch

drawn: install-dev
	$(BIN)/pytest -m endurance -p no:cacheprovider tests/endurance/test_drawn_jobs.py

tables: install-dev
	PYTHONPATH=. $(BIN)/python tests/fakes/page_tables.py

# Pages, examples and what stands at the root are copied together first: links between them then lead somewhere.
docs: install-docs
	rm -rf build/site-source && mkdir -p build/site-source
	cp -r docs/. benchmarks examples devices findings *.md LICENSE CITATION.cff build/site-source
	mv build/site-source/README.md build/site-source/index.md
	sed -i -E 's#\]\(docs/#](#g; s#\]\(README\.md#](index.md#g' build/site-source/*.md
	sed -i -E 's#\]\(\.\./(\.\.|docs)/#](../#g; s#\]\(\.\./README\.md#](../index.md#g' build/site-source/*/*.md
	$(DOCS)/bin/zensical build --strict
