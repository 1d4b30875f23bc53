"""An engine of your own with kvstore as its cache, in a hundred lines and without vLLM, torch or a GPU.

    python examples/any_engine.py [--endpoint HOST:PORT] [--prompt-tokens 2048]

The "engine" is one layer of causal attention in NumPy with random weights: small, but its keys and values are real, so
a wrong block would change the output. It answers a prompt twice. The first time it finds nothing, computes all keys and
values, and sets them; the second time, with empty memory, it loads the leading blocks and computes only the rest. Both
outputs must be equal; exit status 1 if they are not.

Needs a running server: `kvstore-server` or `make serve`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
import numpy.typing as npt

from kvstore_client import KVStoreClient, KVStoreError, Namespace

HEAD_SIZE = 64
BLOCK_TOKENS = 16
VOCABULARY = 1024

Floats = npt.NDArray[np.float32]


class Engine:
    """Attention over a prompt: `answer` gives the last position's output."""

    def __init__(self, client: KVStoreClient) -> None:
        self.client = client
        draw = np.random.default_rng(0)  # the same weights in every engine: the namespace names them
        self.embedding = draw.standard_normal((VOCABULARY, HEAD_SIZE), dtype=np.float32)
        self.query, self.key, self.value = draw.standard_normal((3, HEAD_SIZE, HEAD_SIZE), dtype=np.float32)
        self.wavelengths = np.geomspace(1.0, 10_000.0, HEAD_SIZE, dtype=np.float32)
        self.computed = 0  # tokens whose keys and values were computed here

    def answer(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """The output of the prompt's last token."""
        keys = self.client.namespace.keys(tokens)
        cache = np.empty((len(tokens) + BLOCK_TOKENS, 2, HEAD_SIZE), dtype=np.float32)  # by token: key and value
        rows = cache[: len(keys) * BLOCK_TOKENS].reshape(len(keys), -1).view(np.uint8)  # by block, as it is stored

        cached = self.client.load_prefix(keys, rows) * BLOCK_TOKENS  # one round trip: leading blocks into their rows
        self.prefill(tokens, cache, cached)
        if cached < len(keys) * BLOCK_TOKENS:
            first = cached // BLOCK_TOKENS
            self.client.set(keys[first:], rows[first:])  # so that other engines need not compute these blocks
        return self.attend(tokens[-1], cache[: len(tokens)])

    def prefill(self, tokens: npt.NDArray[np.int64], cache: Floats, start: int) -> None:
        """Keys and values of the tokens from `start` on: the work that a cache saves."""
        for position in range(start, len(tokens)):  # token by token, so that the time is worth saving
            hidden = self.embedding[tokens[position]] + np.sin(position / self.wavelengths)
            cache[position] = hidden @ self.key, hidden @ self.value
            self.computed += 1

    def attend(self, token: int, cache: Floats) -> Floats:
        """Softmax of query and keys, applied to the values."""
        scores = cache[:, 0] @ (self.embedding[token] @ self.query) / np.sqrt(HEAD_SIZE)
        weights = np.exp(scores - scores.max())
        output: Floats = (weights / weights.sum()) @ cache[:, 1]
        return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default=os.environ.get("KVSTORE_ENDPOINT", "127.0.0.1:7070"))
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    options = parser.parse_args()
    if options.prompt_tokens < BLOCK_TOKENS:
        parser.error(f"--prompt-tokens {options.prompt_tokens}: expected at least one block, {BLOCK_TOKENS}")
    namespace = Namespace.for_model(
        "examples/any-engine", layers=1, kv_heads=1, head_size=HEAD_SIZE, dtype="float32", block_tokens=BLOCK_TOKENS
    )
    prompt = np.random.default_rng(time.time_ns()).integers(0, VOCABULARY, options.prompt_tokens)
    outputs = []
    try:
        for name in ("first engine, nothing cached", "second engine, the same prompt"):
            with KVStoreClient(options.endpoint, namespace) as client:
                engine = Engine(client)
                began = time.perf_counter()
                outputs.append(engine.answer(prompt))
                elapsed_ms = (time.perf_counter() - began) * 1e3
            print(f"{name}: computed {engine.computed} of {len(prompt)} tokens in {elapsed_ms:.1f} ms")
    except KVStoreError as error:
        print(f"error: {error}; is kvstore-server running?", file=sys.stderr)
        return 1
    equal = bool(np.array_equal(outputs[0], outputs[1]))
    print("both outputs are equal" if equal else "the outputs DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
