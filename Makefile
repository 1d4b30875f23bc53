# Every target makes the environment it needs; the first `make test` takes minutes, later ones in any checkout do not.
.DEFAULT_GOAL := help
.PHONY: help serve run check test fleet gpu-test gpu-rehearsal coverage soak layouts torture chaos faults rl-loop vllm upgrade attack sanitize lint format docs demo disagg bench pictures man deb check-deb check-service image check-image check-arm64 check-kubernetes build wheels check-install clean clean-cache
# Quotes inside are the shell's: make test PYTEST_ARGS="-k 'eviction or quota'"
ARGS ?=
PYTEST_ARGS ?=

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 24
	@echo "Settings: PYTHON=, ENGINE=0 (no vLLM), KVSTORE_CACHE=FOLDER (environments), CI=true (nothing may be missing),"
	@echo "          TEST_WORKERS=N (tests at once), HYPOTHESIS_PROFILE=dev|ci (few or all examples of property tests)"

serve: ## install into .venv and run the server: ARGS="--port 7070 --memory 4GiB"
	@exec scripts/serve.sh $(ARGS)

run: ## run a command on this checkout: ARGS="kvstore plan --help"; ARGS=bash is a shell for many
	@exec scripts/run.sh full $(ARGS)

check: ## style, types and the quick tests, while working (2 minutes on two cores)
	@exec scripts/run.sh full scripts/check.sh $(PYTEST_ARGS)

test: ## everything: style, types, a real install, all tests; PYTEST_ARGS="-k prefix" runs only the tests it selects
	@exec scripts/run.sh full scripts/test.sh $(PYTEST_ARGS)

coverage: ## the lines of kvstore, kvstore_client, kvstore_serving and kvstore_cli that the tests run, servers included
	@exec scripts/run.sh full scripts/coverage.sh $(PYTEST_ARGS)

gpu-test: ## all tests and benchmarks that need a GPU (docs/gpu.md): PYTHON= an interpreter with torch for CUDA, ARGS="--only swap"
	@scripts/gpu_wheels.sh build/gpu/wheels
	@exec scripts/on_gpu.sh --wheels build/gpu/wheels --out build/gpu/results $(ARGS)

gpu-rehearsal: ## every step of `make gpu-test` in small sizes on the CPU: three minutes
	@KVSTORE_GPU_REHEARSAL=1 scripts/run.sh full python -m pytest tests/integration/test_on_gpu.py

soak: ## engines while the store fails, fills, drains or loses its disk, nine kinds: KVSTORE_SOAK_S=300 seconds each, KVSTORE_SOAK_SEED=, PYTEST_ARGS="-k disk"
	@KVSTORE_SOAK_S=$${KVSTORE_SOAK_S:-300} scripts/run.sh full python -m pytest -m soak -rP $(PYTEST_ARGS)

layouts: ## engines with every layout of a KV cache that vLLM runs on CPUs: states, latents, drafts, fp8
	@KVSTORE_LAYOUTS=1 scripts/run.sh full python -m pytest tests/engine/test_state_models.py tests/engine/test_cache_layouts.py

torture: ## kill -9 and damaged bytes: KVSTORE_TORTURE_ROUNDS=100, KVSTORE_FLIP_TRIALS=1000, KVSTORE_KILLS=10000, KVSTORE_TORTURE_SEED=
	@KVSTORE_TORTURE_ROUNDS=$${KVSTORE_TORTURE_ROUNDS:-100} KVSTORE_FLIP_TRIALS=$${KVSTORE_FLIP_TRIALS:-1000} \
		KVSTORE_KILLS=$${KVSTORE_KILLS:-10000} \
		scripts/run.sh full python -m pytest -s tests/chaos/test_torture.py tests/chaos/test_shared_memory_kills.py \
		tests/integration/test_keeper.py::test_a_damaged_index_never_yields_entries_that_were_not_put \
		tests/integration/test_keeper.py::test_a_keeper_killed_at_any_instant_keeps_committed_entries \
		tests/integration/test_keeper.py::test_a_shard_killed_at_any_instant_keeps_committed_entries

chaos: ## clusters while things go wrong (needs root): every scenario, then KVSTORE_CHAOS_ROUNDS=200 of KVSTORE_CHAOS_SEED=
	@KVSTORE_CHAOS=full KVSTORE_CHAOS_ROUNDS=$${KVSTORE_CHAOS_ROUNDS:-200} scripts/run.sh full python -m pytest -s \
		tests/chaos/test_cluster.py tests/chaos/test_cluster_outages.py tests/chaos/test_cluster_links.py tests/chaos/test_fault_rounds.py

faults: ## hand-overs while engines, store, links or proxy fail: KVSTORE_FAULTS=500 of them, of KVSTORE_FAULTS_SEED=
	@KVSTORE_FAULTS=$${KVSTORE_FAULTS:-500} scripts/run.sh full python -m pytest -s tests/engine/test_hand_over_faults.py \
		tests/engine/test_proxy_faults.py

rl-loop: ## engines whose weights change, with resets, restarts and purges at random: KVSTORE_RL_LOOPS=200 of KVSTORE_RL_SEED=
	@KVSTORE_RL_LOOPS=$${KVSTORE_RL_LOOPS:-200} scripts/run.sh full python -m pytest -s tests/engine/test_rl_loop.py

vllm: ## engine tests with each supported release of vLLM: VERSIONS="0.31.0 0.32.0" (all: 30 minutes on two cores)
	@scripts/run.sh full python -W ignore scripts/vllm_releases.py $(VERSIONS)

upgrade: ## a cluster of the last release (tests/data), upgraded node by node while clients of both releases work
	@KVSTORE_UPGRADE=full scripts/run.sh test python -m pytest -s tests/upgrade

fleet: ## all comparisons of the proxy with the engines behind it, of which `make test` makes a third
	@KVSTORE_FLEET=full scripts/run.sh full python -m pytest -s tests/engine/test_transparent.py tests/engine/test_transparent_client.py \
	    tests/engine/test_transparent_http.py \
	    tests/engine/test_split_answers.py tests/engine/test_leaving.py

attack: ## hostile clients: memory, latency, commands between frames, slow disks, at length
	@KVSTORE_ATTACK=full scripts/run.sh full python -m pytest -s tests/attack

sanitize: ## the unit tests and the fuzz on an extension built with AddressSanitizer and UBSan: ARGS="tests/unit/test_index.py"
	@exec scripts/run.sh full scripts/sanitize.sh $(ARGS)

lint: ## ruff and mypy
	@exec scripts/run.sh test scripts/lint.sh

format: ## put imports and layout in order
	@exec scripts/run.sh test bash -c 'ruff check --fix . ; ruff format .'

docs: ## this documentation with the API reference as a site in build/site; warnings are errors
	@exec scripts/run.sh test env NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

demo: ## two engines share their prefixes through a server: examples/demo.py
	@exec scripts/run.sh full python examples/demo.py $(ARGS)

disagg: ## a store, a prefill engine, a decode engine and the proxy: where a request's time goes (examples/disaggregated.py)
	@exec scripts/run.sh full python examples/disaggregated.py $(ARGS)

bench: ## every benchmark; says first how long it takes: ARGS="--resume" goes on, ARGS="--plan" only says
	@exec scripts/run.sh full python -m benchmarks.run_all $(ARGS)

pictures: ## draw docs/pictures and docs/page.png anew; the screens are of real servers, for two minutes (chromium, etcd)
	@scripts/run.sh test python scripts/draw_pictures.py
	@exec scripts/run.sh test python scripts/draw_screens.py

man: ## the manual pages of both commands and all subcommands, in build/man: man -l build/man/kvstore-server.1
	@exec scripts/run.sh test python scripts/shell_files.py man build/man

deb: ## a Debian package with its own environment in /opt/kvstore, a systemd unit, manual pages and completion, into dist/
	@exec scripts/deb.sh dist

check-deb: ## build the Debian package, unpack it and try its server
	@exec scripts/check_deb.sh

check-service: ## install that package in a separate Debian system under systemd: start, reload, crashes, upgrade, purge (needs root)
	@KVSTORE_SERVICE=1 scripts/run.sh test python -m pytest -v tests/integration/test_debian_package.py $(PYTEST_ARGS)

image: ## both container images, with docker, podman or buildah: ARGS="--platform linux/arm64", IMAGE_BUILDER=, PYTHON_IMAGE=, DEBIAN_IMAGE=
	@exec scripts/image.sh $(ARGS)

check-image: ## build both images in separate storage and run them with podman (needs root): BASE_IMAGES=official
	@exec scripts/run.sh test scripts/check_image.sh $(PYTEST_ARGS)

check-arm64: ## wheels, compiled modules and tests of the native code for arm64, with a cross compiler and qemu (needs root)
	@exec scripts/run.sh test scripts/check_arm64.sh $(PYTEST_ARGS)

check-kubernetes: ## the manifests and the Helm chart against the schemas of Kubernetes 1.27 to 1.37, and with Helm
	@exec scripts/run.sh test python scripts/check_kubernetes.py

build: ## the wheel, into dist/
	@exec scripts/wheel.sh dist

wheels: ## an sdist and manylinux wheels for each Python that is here, into dist/: PYTHONS="/path/to/python3.12 ..."
	@exec scripts/wheels.sh dist

check-install: ## install such a wheel into a scratch environment without a compiler, and try it
	@exec scripts/check_install.sh

clean: ## remove what was built in this checkout
	rm -rf .venv build dist *.egg-info cext/_*.c kvstore/_*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache: ## remove the environments that all checkouts share
	rm -rf "$${KVSTORE_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/kvstore}"/venv-*
