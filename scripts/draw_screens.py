"""Makes docs/page.png and docs/pictures/top.svg: pictures of a cluster of three real servers with real traffic. The
first picture is the cluster's page in a real browser, and the second is `kvstore top` in a terminal. Takes two minutes;
needs chromium and etcd.

scripts/run.sh test python scripts/draw_screens.py [SECONDS]
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
from rich.console import Console  # noqa: E402

from kvstore_cli.top import _Shown, _table  # noqa: E402
from kvstore_cli.top_state import Looking  # noqa: E402
from kvstore_client import KVStoreClient, Namespace  # noqa: E402
from tests.support.browser import Browser  # noqa: E402
from tests.support.etcd import Etcd  # noqa: E402
from tests.support.harness import Server, make_keys  # noqa: E402

PAGE = ROOT / "docs" / "page.png"
TOP = ROOT / "docs" / "pictures" / "top.svg"
MODELS = {"Qwen/Qwen2.5-7B-Instruct": 65536, "meta-llama/Llama-3.1-8B-Instruct": 131072, "BAAI/bge-m3": 16384}
CHAIN = 32  # blocks of a prompt
NODES = ("cache-1", "cache-2", "cache-3")
WIDTH, HEIGHT = 1200, 1900  # the size of the browser's window; the page is shorter
MARGIN = 16  # pixels below the shown part of the page
TOP_COLUMNS = 98
TOP_S = 2.0  # seconds between two updates, as in `kvstore top`
# rich's own template loads a font from another host.
TEMPLATE = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>kvstore top</title>
<desc>A table in a terminal: a row for each node of a cluster, with hit rate, traffic, blocks, memory and disk.</desc>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def traffic(cluster: str, model: str, block_bytes: int, ended: threading.Event) -> None:
    """Repeat prompts, some more often than others, and set the missing blocks."""
    namespace = Namespace(model=model, dtype="bfloat16", block_tokens=16, block_bytes=block_bytes)
    draw = random.Random(model)
    block = bytes(block_bytes)
    began = time.monotonic()
    with KVStoreClient(cluster, namespace) as client:
        while not ended.wait(draw.expovariate(6 + 4 * ((time.monotonic() - began) // 20 % 2))):
            prompt = min(int(draw.expovariate(1 / 25)), 150)
            keys = make_keys(CHAIN, first=prompt * CHAIN)
            found = client.get(keys).blocks
            missing = [key for key, there in zip(keys, found, strict=True) if there is None]
            if missing:
                client.set(missing, [block] * len(missing))


def draw_page(browser: Browser) -> None:
    """Take a picture of the page down to its namespaces."""

    def end() -> int:
        return int(browser.evaluate("document.querySelector('#namespaces-about').getBoundingClientRect().bottom"))

    before, taken = end(), browser.picture()
    while (after := end()) != before:  # a message appeared or disappeared meanwhile
        before, taken = after, browser.picture()
    with Image.open(io.BytesIO(taken)) as picture:
        picture.crop((0, 0, WIDTH, before + MARGIN)).convert("RGB").quantize(64).save(PAGE, optimize=True)


def draw_top(cluster: str) -> None:
    """Draw the output of `kvstore top` for these nodes."""
    nobody = Namespace(model="kvstore-cli", dtype="uint8", block_tokens=1, block_bytes=1)
    with KVStoreClient(cluster, nobody, fail_open=True) as client, open("/dev/null", "w") as nowhere:
        looking = Looking(client, False)
        looking.look()
        time.sleep(TOP_S)
        shown = _Shown("name", False)
        console = Console(record=True, width=TOP_COLUMNS, file=nowhere, highlight=False, force_terminal=True)
        console.print(_table(shown.sorted(looking.look()), shown, console, keys=True))
        drawn = console.export_svg(title="kvstore top", code_format=TEMPLATE, unique_id="top")
    TOP.write_text("".join(f"{line.rstrip()}\n" for line in drawn.splitlines()), encoding="utf-8")


def main(seconds: float) -> None:
    """Run the servers and their traffic for this many seconds, then take the pictures."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = Etcd(folder / "etcd")
        stack.callback(etcd.kill)
        cluster = etcd.url("prod")
        servers = []
        for node in NODES:
            servers.append(
                Server(
                    folder / f"{node}.log",
                    *("--shards", "2", "--memory", "96MiB", "--segment", "4MiB", "--http", "127.0.0.1:0"),
                    *("--disk", str(folder / node), "--disk-size", "192MiB"),
                    *("--cluster", cluster, "--node-id", node, "--zone", f"rack-{node[-1]}", "--grace-seconds", "0"),
                )
            )
            stack.callback(servers[-1].kill)
        browser = Browser(folder / "browser")
        stack.callback(browser.close)
        browser.look(WIDTH, HEIGHT)
        browser.open(servers[0].http_url)
        ended = threading.Event()
        threads = [
            threading.Thread(target=traffic, args=(cluster, model, size, ended)) for model, size in MODELS.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        draw_page(browser)
        draw_top(cluster)
        ended.set()
        for thread in threads:
            thread.join()
    for file in (PAGE, TOP):
        print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 110.0)
