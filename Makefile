# A newcomer needs only two commands: `make demo` and `make test`. Each sets up what it uses: a
# virtual environment in the tree, and the build in place. Stamp files in the environment record what is done,
# so a second run starts at once, and an edited source is built again.
#
# Another interpreter:  make test PYTHON=python3.13     (in an environment of its own)

PYTHON ?= python3
VENV   ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
FILE   ?=
ARGS   ?=
WHEEL_DIR ?= dist

export PYTHONPATH := $(CURDIR)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

py      := $(VENV)/bin/python
suites  := PYTHONPATH=$(CURDIR):$(CURDIR)/scripts $(py) -m suites
locked  := --require-hashes --only-binary :all:
pip     := $(py) -m pip install --quiet $(locked) --constraint requirements/constraints.txt
sources := setup.py $(wildcard rdmanet/*.py rdmanet/*.pyx rdmanet/*.pxd rdmanet/_pyx/* rdmanet/abi/* \
             rdmanet/wire/*.py rdmanet/wire/*.pxd rdmanet/stream/*.py rdmanet/stream/*.pxd rdmanet/rpc/*.pyx \
             rdmanet/rpc/*.px[di] $(patsubst %.pxd,%.py,$(wildcard rdmanet/rpc/*.pxd)) \
             rdmanet/soft/*/*.c rdmanet/soft/*/*.h rdmanet/soft/soft.map)
modules := $(wildcard rdmanet/*.py rdmanet/*/*.py rdmanet/*/*/*.py rdmanet/*/*/*/*.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lock demo test litmus test-all gate gate-steps matrix steady test-netns test-kernel check lint bench bench-quick bench-crowd bench-hosts bench-thinking bench-blocking bench-arrays bench-perftest bench-watching figures bench-connecting bench-starting bench-storm bench-growing bench-falling-back bench-rpc bench-libraries bench-peers bench-proxy bench-ray bench-dask count test-c test-asan fuzz stress soak foreign foreign-quick libraries proxy-servers pyverbs build wheel wheels sdist clean distclean prerequisites docs look engines frameworks

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/    make \1\t\2/p' Makefile | expand -t 24

demo: build ## set everything up, then show two processes talking asyncio over RDMA (FILE=path to send your own)
	@$(py) -m rdmanet demo $(FILE)

test: build $(VENV)/.test ## set everything up, then run the tests but the long ones (ARGS="-k name -x": pytest with these arguments)
	@$(if $(ARGS),$(py) -m pytest $(ARGS),$(suites) test)

litmus: $(VENV)/.test ## check the protocols of shared memory against C11's memory model, and that weaker orders fail
	@$(py) -m pytest -q tests/litmus tests/test_shared_words.py $(ARGS)

test-all: build $(VENV)/.test ## run all tests, also those that are long
	@$(suites) test-all

# Half of the event loops by IPv4, the other half by IPv6. Tests of our side alone stay out.
test-netns: build $(VENV)/.test ## run the suite between two hosts, network namespaces joined by veth (root)
	@$(py) -m pytest tests/netns $(ARGS)
	@$(py) scripts/two_hosts.py $(py) -m pytest --across 4 -m "not once" --loop asyncio --loop trio tests/streams tests/verbs $(ARGS)
	@$(py) scripts/two_hosts.py $(py) -m pytest --across 6 -m "not once" --loop uvloop --loop own tests/streams tests/verbs $(ARGS)

test-kernel: build $(VENV)/.test ## run all tests that use a device on the kernel's soft-RoCE and soft-iWARP, in QEMU (twelve minutes)
	@$(py) scripts/test-kernel $(ARGS)

GRAPHS ?= 10000

build/asan/.built: $(VENV)/.built
	@RDMANET_DEBUG=1 RDMANET_SANITIZE=address,undefined scripts/progress "building with sanitizers" $(py) setup.py --quiet build --build-base build/asan --build-lib build/asan/lib
	@touch $@

# Without the streams' long tests: a thousand repetitions show nothing new here, and measure the sanitizer's memory
# instead of ours. On uvloop and not on asyncio's loop as well: the memory is the same.
test-asan: build $(VENV)/.test build/asan/.built ## run random graphs of objects (GRAPHS=n), and all tests that use a device, under the address sanitizer
	@scripts/asan $(py) tests/verbs/object_graphs.py --count $(GRAPHS)
	@scripts/asan $(py) -P -m pytest $(or $(ARGS),--loop uvloop --loop trio --loop own tests/verbs tests/verbs_async)
	@$(if $(ARGS),,scripts/asan $(py) -P -m pytest --loop uvloop tests/streams -m 'not long')

# --- before a commit lands -------------------------------------------------------------------------------

COMMIT ?= HEAD
N ?= 30

gate: ## run .ci/run on a clean clone of a commit (COMMIT=next); on green its hash goes to build/gate-passed
	@scripts/gate $(COMMIT)

# What .ci/run does when everything is set up.
gate-steps: build $(VENV)/.test
	@SUITES_PYTHON=$(PYTHON) $(suites) gate

matrix: build $(VENV)/.test build/asan/.built ## run all suites that the gate does not (ARGS="--resume", ARGS="netns kernel")
	@SUITES_PYTHON=$(PYTHON) $(suites) matrix $(ARGS)

steady: build $(VENV)/.test ## run tests again and again beside load (ARGS="tests/streams -k close" N=50)
	@$(suites).steady -n $(N) $(ARGS)

# --- set-up -------------------------------------------------------------------------------------------

setup: build $(VENV)/.test ## set everything up for the tests
	@:

build: $(VENV)/.built $(VENV)/.compiled ## build the extension and the embedded device in place
	@:

# pip installs only the files whose hashes are in requirements/, and builds none itself. The same holds for what building
# the wheel needs. Old pips check the hashes of requirements, but not of constraints: so the interpreter's own pip first
# installs our pip, from a list of requirements.
$(VENV)/.run: pyproject.toml $(wildcard requirements/*.txt) scripts/prerequisites
	@scripts/prerequisites $(PYTHON)
	@scripts/progress "setting up $(VENV) ($$($(PYTHON) -V))" $(PYTHON) -m venv $(VENV)
	@scripts/progress "installing pip" $(py) -m pip install --quiet $(locked) --requirement requirements/pip.txt
	@scripts/progress "installing what rdmanet runs on" $(pip) --group run
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@scripts/progress "installing the group test" $(pip) --group test
	@touch $@

$(VENV)/.check: $(VENV)/.run
	@scripts/progress "installing the group check" $(pip) --group check
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	@scripts/progress "installing the group docs" $(pip) --group docs
	@touch $@

$(VENV)/.built: $(VENV)/.run $(sources)
	@scripts/progress "building (a minute or two the first time)" $(py) setup.py --quiet build_ext --inplace
	@touch $@

# As pip does with what it installs. Users who may not write here, and programs with PYTHONDONTWRITEBYTECODE, would
# compile each module in each process that imports it, which takes more time than a first connection takes without.
$(VENV)/.compiled: $(VENV)/.run $(modules)
	@$(py) -m compileall -q rdmanet
	@touch $@

# In an environment of its own: this chooses what the others contain.
lock: ## choose versions from pyproject.toml's ranges, and write them down with hashes (ARGS=--upgrade: the newest)
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet $(locked) --requirement requirements/lock.txt
	@scripts/lock build/lock/bin/uv $(ARGS)

prerequisites: ## say which packages this machine lacks, if any
	@scripts/prerequisites $(PYTHON)

# --- checks -------------------------------------------------------------------------------------------

check: lint ## lint, and the whole build with warnings as errors
	RDMANET_WERROR=1 $(py) setup.py --quiet build_ext --build-lib build/check --build-temp build/check

lint: build $(VENV)/.test $(VENV)/.check ## check style, formatting, types and stubs
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	PATH=$(abspath $(VENV)/bin):$$PATH cython-lint rdmanet/*.pyx rdmanet/*/*.pyx rdmanet/*.pxd rdmanet/*/*.pxd rdmanet/*/*.pxi
	$(py) -m mypy
	PATH=$(abspath $(VENV)/bin):$$PATH scripts/check-workflows
	$(py) -m mypy.stubtest rdmanet._core --concise --ignore-disjoint-bases --allowlist tests/unit/stub-exceptions

docs: build $(VENV)/.docs ## make the manual, build/docs/index.html; a warning is an error
	@$(py) -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

look: docs ## look at each page of the manual in headless Chromium: none may be wider than the window
	@$(py) scripts/check-pages

SANITIZE ?= address,undefined

test-c: prerequisites ## run the C tests of the embedded device under sanitizers (SANITIZE=thread for the thread sanitizer)
	@$(MAKE) --no-print-directory -C tests/c check SAN=$(SANITIZE)

# In an environment of its own: these libraries are no part of rdmanet, and choose their dependencies themselves.
build/libraries/.done: requirements/libraries.txt $(VENV)/.run
	@$(PYTHON) -m venv --clear build/libraries
	@scripts/progress "installing libraries to try" build/libraries/bin/python -m pip install --quiet $(locked) --requirement requirements/libraries.txt
	@touch $@

# uvloop's and aiohttp's own tests are in their source distributions only, of which nothing is installed. pip runs the
# build of each to hear its name and version: with the tools of $(VENV), which are locked, not with others that it
# downloads for that.
define tests_of
@rm -rf $@.new
@mkdir -p $@.new
@grep -A999 '^$(1)==' requirements/libraries.txt | sed '/[^\\]$$/q' >$@.new/requirement.txt
@scripts/progress "downloading $(1)'s tests" $(py) -m pip download --quiet --no-deps --no-build-isolation --require-hashes --no-binary $(1) --dest $@.new --requirement $@.new/requirement.txt
@tar -xzf $@.new/$(1)-*.tar.gz -C $@.new --strip-components=1 --wildcards '*/tests'
@rm -rf $@
@mv $@.new $@
endef

build/libraries/uvloop: build/libraries/.done
	$(call tests_of,uvloop)

build/libraries/aiohttp: build/libraries/.done
	$(call tests_of,aiohttp)

# websockets' are not: these are of the release that Debian keeps, with the code that they test. "tests" is our package.
websockets := python-websockets_15.0.1.orig.tar.gz
websockets_sha256 := 8451495265af3e368f794c4dc15c99ce90c771d95560f542bff8c64b5455af3b

build/libraries/websockets: build/libraries/.done
	@mkdir -p $@
	@scripts/progress "downloading websockets' tests" /usr/lib/apt/apt-helper download-file http://deb.debian.org/debian/pool/main/p/python-websockets/$(websockets) $@/$(websockets) SHA256:$(websockets_sha256)
	@tar -xzf $@/$(websockets) -C $@ --strip-components=1 --transform 's,^\([^/]*\)/tests,\1/websockets_tests,' --wildcards '*/tests' '*/src/websockets'
	@touch $@

libraries: build build/libraries/uvloop build/libraries/aiohttp build/libraries/websockets ## try aiohttp, uvicorn, httpx, redis-py and others, unmodified, and uvloop's, aiohttp's and websockets' own tests, on the event loop
	@build/libraries/bin/python -m pytest -c tests/libraries/pytest.ini --confcutdir tests/libraries -m "not long" tests/libraries $(ARGS)

# Without their dependencies: pyproject.toml says which those are.
build/engines/.done: requirements/engines.txt $(VENV)/.run
	@$(PYTHON) -m venv --clear build/engines
	@scripts/progress "installing transfer engines to try" build/engines/bin/python -m pip install --quiet --no-deps $(locked) --requirement requirements/engines.txt
	@touch $@

engines: build $(VENV)/.test build/engines/.done ## try NIXL, Mooncake, DLSlime and PeerCache, unmodified, on the embedded device
	@RDMANET_TEST_ENGINES=build/engines/bin/python $(py) -m pytest -c tests/engines/pytest.ini --rootdir tests/engines tests/engines $(ARGS)

# In an environment of its own. rdmanet's own tests need none of it.
build/frameworks/.done: requirements/frameworks.txt $(VENV)/.run
	@$(PYTHON) -m venv --clear build/frameworks
	@scripts/progress "installing frameworks to try" build/frameworks/bin/python -m pip install --quiet $(locked) --requirement requirements/frameworks.txt
	@touch $@

bench-ray: build build/frameworks/.done ## compare an array between two of Ray's actors by RDMA and by its object store
	@PYTHONPATH=$(CURDIR) build/frameworks/bin/python -m benchmarks.ray_arrays $(ARGS)

bench-dask: build build/frameworks/.done ## compare arrays that Dask moves by RDMA with the same over TCP
	@PYTHONPATH=$(CURDIR) build/frameworks/bin/python -m benchmarks.dask_arrays $(ARGS)

frameworks: build build/frameworks/.done ## try Dask and Ray over rdmanet
	@build/frameworks/bin/python -m pytest -c tests/frameworks/pytest.ini --confcutdir tests/frameworks tests/frameworks $(ARGS)

foreign: build ## run Debian's RDMA programs, and transfer engines if they are installed, on the embedded device (ten minutes); writes the table in docs/soft-device.md
	@$(py) scripts/foreign.py --write $(ARGS)

foreign-quick: build ## run the short ones of these
	@$(py) scripts/foreign.py --quick $(ARGS)

proxy-servers: build $(VENV)/.test ## run PostgreSQL's and Redis' programs through two proxies (a minute)
	@RDMANET_TEST_SERVERS=required $(py) -m pytest tests/cli/test_proxy_servers.py $(ARGS)

pyverbs: build ## run rdma-core's pyverbs tests on the embedded device, and check that each ends as expected
	@$(py) scripts/pyverbs_suite.py $(ARGS)

SECONDS ?= 20

fuzz: ## fuzz everything that a peer may send, each kind for SECONDS=20 (clang and libclang-rt-dev)
	@$(MAKE) --no-print-directory -C tests/fuzz fuzz SECONDS=$(SECONDS)

stress: prerequisites ## run random work between threads and processes, some of them killed, each kind for SECONDS=20 (SEED=n)
	@$(MAKE) --no-print-directory -C tests/c stress SAN=$(SANITIZE) SECONDS=$(SECONDS) SEED=$(SEED)

soak: build ## run processes that talk to each other, kill and stop some, and check that every connection ends (SECONDS=600 SEED=n)
	@$(py) -m tests.soak $(if $(filter command line environment,$(origin SECONDS)),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

# --- measuring ----------------------------------------------------------------------------------------

bench: build ## measure against asyncio and uvloop sockets (about half an hour); results in benchmarks/results
	@$(py) -m benchmarks $(ARGS)

bench-quick: build ## run the same cases briefly: whether they run, and roughly how fast
	@$(py) -m benchmarks --quick $(ARGS)

bench-crowd: build ## compare what a message costs beside 500 and 5,000 idle connections with its cost beside none
	@$(py) -m benchmarks.crowd $(ARGS)

bench-hosts: build ## compare the device between two hosts (network namespaces; root) with plain C over TCP
	@$(py) -m benchmarks.hosts $(ARGS)

bench-thinking: build ## measure request and reply between programs that work for each message
	@$(py) -m benchmarks.thinking $(ARGS)

bench-blocking: build ## measure blocking streams beside blocking sockets
	@$(py) -m benchmarks.blocking $(ARGS)

bench-arrays: build ## measure large arrays beside TCP and Unix sockets
	@$(py) -m benchmarks.arrays $(ARGS)

bench-perftest: build ## compare `rdmanet perf` with perftest's programs, on the embedded device
	@$(py) -m benchmarks.perftest $(ARGS)

bench-watching: build ## measure what `rdmanet ss --watch` and RDMANET_TRACE cost (ARGS="--crowd 10000": a list of so many)
	@$(py) -m benchmarks.watching $(ARGS)

figures: build ## measure the figures of README, the front page and docs/performance.md, and renew the pages (five minutes)
	@$(py) -m benchmarks.figures --measure $(ARGS)

# Beside the packages of $(VENV), not among them.
build/rpc-peers/.done: requirements/rpc-peers.txt $(VENV)/.run
	@scripts/progress "installing other RPC libraries" $(py) -m pip install --quiet $(locked) --upgrade --target build/rpc-peers --requirement requirements/rpc-peers.txt
	@touch $@

bench-rpc: build build/rpc-peers/.done ## measure calls, beside streams and other RPC libraries
	@$(py) -m benchmarks.rpc $(ARGS)

bench-connecting: build ## measure how many connections a second a client makes
	@$(py) -m benchmarks.connecting $(ARGS)

bench-starting: build ## measure a program that starts, says one thing and ends, beside TCP
	@$(py) -m benchmarks.starting $(ARGS)

bench-proxy: build ## measure what `rdmanet proxy` costs a client of Redis (needs redis-server and redis-benchmark)
	@$(py) -m benchmarks.proxying $(ARGS)

bench-storm: build ## measure 1,000 clients of 20 processes that connect at once, and again when the server has restarted
	@$(py) -m benchmarks.storm $(ARGS)

bench-growing: build ## measure what receive slots that grow cost a new connection
	@$(py) -m benchmarks.growing $(ARGS)

bench-falling-back: build ## measure what a connection by TCP takes on the switched loop
	@$(py) -m benchmarks.falling_back $(ARGS)

bench-peers: build ## measure request and reply, and one way, beside pyzmq, iceoryx2, Zenoh, UCX, gRPC, pipes and shared memory (a quarter of an hour)
	@$(py) -m benchmarks.peers $(ARGS)

bench-libraries: build build/libraries/.done ## measure aiohttp, uvicorn, httpx, redis-py and others, unmodified, beside TCP
	@build/libraries/bin/python -m benchmarks.libraries $(ARGS)

count: build ## count system calls, wake-ups, copies and Python calls of a message
	@$(py) -m benchmarks.count $(ARGS)

# --- packaging and cleaning ---------------------------------------------------------------------------

# In an environment of its own, as pip does by default, so that [build-system] must name everything it needs. Those
# packages must also be in the constraints, with their hashes.
wheel: $(VENV)/.run ## build a wheel into dist/ (WHEEL_DIR=path for elsewhere)
	@$(py) -m pip wheel --quiet --no-deps --build-constraint requirements/constraints.txt --wheel-dir $(WHEEL_DIR) .

sdist: build ## make the source distribution in dist/ (WHEEL_DIR=path for elsewhere)
	@$(py) setup.py --quiet sdist --dist-dir $(WHEEL_DIR)

PYTHONS ?= $(PYTHON)

wheels: prerequisites ## build wheels for x86-64 and aarch64, for glibc 2.28 and newer (PYTHONS="python3.12 python3.13" MACHINES=aarch64 WHEEL_DIR=path)
	@scripts/wheels $(WHEEL_DIR) $(PYTHONS)

clean: ## remove what the build made
	rm -rf build dist *.egg-info rdmanet/*.c rdmanet/stream/*.c rdmanet/wire/*.c rdmanet/rpc/*.c rdmanet/*.so rdmanet/*/*.so rdmanet/*.html tests/c/build* tests/fuzz/build
	rm -f .venv*/.built

distclean: clean ## remove the virtual environments and caches too
	rm -rf .venv* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
