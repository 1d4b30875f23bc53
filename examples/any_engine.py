"""An engine of your own with kvstore as its cache, in a hundred lines and without vLLM, torch or a GPU.

    python examples/any_engine.py [--endpoint HOST:PORT] [--prompt-tokens 2048]

The "engine" is one layer of causal attention in NumPy with random weights: small, but its keys and values are real, so
a wrong block would change the output. It answers a prompt twice. The first time it finds nothing, computes all keys and
values, and sets them. The second time, with empty memory, it loads the leading blocks and computes only the rest. The
exit status is 1 if the two outputs differ.

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
    """Attention over a prompt. `answer` returns the last position's output."""

    def __init__(self, client: KVStoreClient) -> None:
        self.client = client
        draw = np.random.default_rng(0)  # the same weights in every engine: the namespace names them
        self.embedding = draw.standard_normal((VOCABULARY, HEAD_SIZE), dtype=np.float32)
        self.query, self.key, self.value = draw.standard_normal((3, HEAD_SIZE, HEAD_SIZE), dtype=np.float32)
        self.wavelengths = np.geomspace(1.0, 10_000.0, HEAD_SIZE, dtype=np.float32)
        self.computed = 0  # how many tokens' keys and values were computed here

    def answer(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """Return the output of the prompt's last token."""
        keys = self.client.namespace.keys(tokens)
        cache = np.empty((len(tokens) + BLOCK_TOKENS, 2, HEAD_SIZE), dtype=np.float32)  # for each token: key and value
        rows = cache[: len(keys) * BLOCK_TOKENS].reshape(len(keys), -1).view(np.uint8)  # a row is a block

        cached = self.client.load_prefix(keys, rows) * BLOCK_TOKENS  # one round trip: leading blocks into their rows
        self.prefill(tokens, cache, cached)
        if cached < len(keys) * BLOCK_TOKENS:
            first = cached // BLOCK_TOKENS
            parent = keys[first - 1] if first else None  # the block before them, so that it is evicted after them
            self.client.set(keys[first:], rows[first:], parent=parent)  # other engines need not compute these blocks
        return self.attend(tokens[-1], cache[: len(tokens)])

    def prefill(self, tokens: npt.NDArray[np.int64], cache: Floats, start: int) -> None:
        """Compute keys and values of the tokens from `start` on. A cache saves this work."""
        for position in range(start, len(tokens)):  # token by token, slow enough that loading saves time
            hidden = self.embedding[tokens[position]] + np.sin(position / self.wavelengths)
            cache[position] = hidden @ self.key, hidden @ self.value
            self.computed += 1

    def attend(self, token: int, cache: Floats) -> Floats:
        """Return the softmax of query and keys, applied to the values."""
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
