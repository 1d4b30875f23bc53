"""Makes docs/page.png: the page of a real server with real traffic, in a real browser. Takes two minutes.

scripts/run.sh test python scripts/page_picture.py [SECONDS]
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from kvstore_client import KVStoreClient, Namespace  # noqa: E402
from tests.support.browser import Browser  # noqa: E402
from tests.support.harness import Server, make_keys  # noqa: E402

PICTURE = ROOT / "docs" / "page.png"
MODELS = {"Qwen/Qwen2.5-7B-Instruct": 65536, "meta-llama/Llama-3.1-8B-Instruct": 131072, "BAAI/bge-m3": 16384}
CHAIN = 32  # blocks of a prompt


def traffic(endpoint: str, model: str, block_bytes: int, ended: threading.Event) -> None:
    """Prompts come again, some more often than others; what is missing is set."""
    namespace = Namespace(model=model, dtype="bfloat16", block_tokens=16, block_bytes=block_bytes)
    draw = random.Random(model)
    block = bytes(block_bytes)
    began = time.monotonic()
    with KVStoreClient(endpoint, namespace) as client:
        while not ended.wait(draw.expovariate(6 + 4 * ((time.monotonic() - began) // 20 % 2))):
            prompt = min(int(draw.expovariate(1 / 25)), 150)
            keys = make_keys(CHAIN, first=prompt * CHAIN)
            found = client.get(keys).blocks
            missing = [key for key, there in zip(keys, found, strict=True) if there is None]
            if missing:
                client.set(missing, [block] * len(missing))


def main(seconds: float) -> None:
    """Run the server and its traffic for so long, then take the picture."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Server(
            folder / "log",
            *("--shards", "2", "--memory", "256MiB", "--segment", "4MiB", "--http", "127.0.0.1:0"),
            *("--disk", str(folder / "disk"), "--disk-size", "512MiB", "--node-id", "cache-1"),
        )
        stack.callback(server.stop)
        browser = Browser(folder / "browser")
        stack.callback(browser.close)
        browser.look(1200, 1450)
        browser.open(server.http_url)
        ended = threading.Event()
        threads = [
            threading.Thread(target=traffic, args=(server.endpoint, model, size, ended))
            for model, size in MODELS.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        with Image.open(io.BytesIO(browser.picture())) as picture:
            picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)
        ended.set()
        for thread in threads:
            thread.join()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 110.0)
