"""A program that answers prompts with the vLLM of its environment, with or without a store. It prints the answers.

python -m tests.engine.one_release MODEL SEED... [--endpoint tcp://HOST:PORT]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

import vllm

from tests.engine.driver import Serving, make_engine
from tests.engine.engines import prompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--endpoint")
    arguments = parser.parse_args()
    connector = {"endpoint": arguments.endpoint, "always_load": True} if arguments.endpoint else None
    with contextlib.redirect_stdout(sys.stderr):
        spec = {"model": arguments.model, "connector": connector, "kv_role": "kv_both", "beside": []}
        serving = Serving(make_engine({**spec, "load_failure_policy": "", "engine": {}}))
        answers = serving.generate([prompt(seed) for seed in arguments.seeds], 8)
        if connector is not None:
            serving.settle()
        serving.llm.llm_engine.engine_core.shutdown()
    found = [{"tokens": each.token_ids, "cached": each.cached_tokens} for each in answers]
    print(json.dumps({"release": vllm.__version__, "answers": found}))


if __name__ == "__main__":
    main()
