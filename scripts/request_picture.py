"""Makes docs/pictures/request.svg: the time of one real request through a proxy, two engines and the store.

scripts/run.sh full python scripts/request_picture.py [--record]

It draws docs/pictures/request.trace.json, an output of `kvstore trace`. With --record it first makes this file: it
starts all processes on this machine, sends `REQUESTS` requests, and keeps the one of median length. This takes half a
minute.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FOLDER: Final = ROOT / "docs" / "pictures"
PICTURE, TRACE = FOLDER / "request.svg", FOLDER / "request.trace.json"
PROMPT_TOKENS, ANSWER_TOKENS, CHUNK_TOKENS = 2048, 48, 512
WARM_UPS, REQUESTS = 2, 7

# The rows from top to bottom: a row of the trace -> (its label, a part of the trace -> (its kind, the text in the
# bar)).
ROWS: Final[dict[str, tuple[str, dict[str, tuple[str, str]]]]] = {
    "proxy": ("Proxy", {"POST /v1/completions": ("request", "the request, as the user sees it")}),
    "P": ("P, prefill engine", {"queue": ("wait", ""), "prefill": ("compute", "computes the prompt")}),
    "store, from P": ("P to store", {"promise": ("ask", ""), "set": ("move", "sets blocks as they are computed")}),
    "store, to D": ("Store to D", {"promise": ("ask", ""), "get": ("move", "gets blocks as they arrive")}),
    "D": (
        "D, decode engine",
        {
            "queue": ("wait", ""),
            "load": ("wait", "waits; serves other requests"),
            "decode": ("compute", "computes the answer"),
        },
    ),
}
LEGEND: Final = {
    "compute": "the engine computes",
    "move": "blocks move",
    "ask": "promise: who computes the blocks?",
    "wait": "the request waits",
}
WIDTH, LABELS, RIGHT, TOP, ROW, BAR = 860, 140, 24, 66, 40, 26
TICK_MS: Final = 100
STYLE: Final = """
  .panel { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
  .small { font-size: 12px }
  .grid { stroke: #d8dee4 }
  .moment { stroke: #cf222e; stroke-dasharray: 4 3 }
  .request { fill: #d8dee4 }
  .wait { fill: #e6e9ec; stroke: #8c959f }
  .compute { fill: #9ec8f5 }
  .move { fill: #f5c28b }
  .ask { fill: #c3a6ea }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #151b23; stroke: #3d444d }
    text { fill: #f0f6fc }
    .grid { stroke: #2f3742 }
    .moment { stroke: #ff7b72 }
    .request { fill: #3d444d }
    .wait { fill: #262c36; stroke: #7d8590 }
    .compute { fill: #1f5a94 }
    .move { fill: #8a5312 }
    .ask { fill: #64459b }
  }
"""


@dataclass(frozen=True)
class Part:
    """A part of the request. Times are in milliseconds since its beginning."""

    row: str
    name: str
    began: float
    ended: float


def parts_of(document: dict[str, Any]) -> list[Part]:
    """Return the parts of one request in the output of `kvstore trace`."""
    events = document["traceEvents"]
    rows = {each["tid"]: each["args"]["name"].partition(" (")[0] for each in events if each["name"] == "thread_name"}
    timed = [each for each in events if each["ph"] != "M"]
    start = min(each["ts"] for each in timed)
    return [
        Part(
            rows[each["tid"]],
            each["name"],
            (each["ts"] - start) / 1000,
            (each["ts"] + each.get("dur", 0) - start) / 1000,
        )
        for each in timed
    ]


def moment(parts: list[Part], row: str) -> float:
    """Return the time at which the first token came from the engine of this row."""
    [found] = [part.began for part in parts if (part.row, part.name) == (row, "first token")]
    return found


def draw(document: dict[str, Any]) -> str:
    """Return the picture of a trace, as SVG."""
    parts = parts_of(document)
    end = max(part.ended for part in parts)
    bottom = TOP + ROW * len(ROWS)
    height = bottom + 68

    def x(ms: float) -> float:
        return LABELS + ms * (WIDTH - LABELS - RIGHT) / end

    from_p, from_d = moment(parts, "proxy to P"), moment(parts, "proxy to D")
    described = (
        "P computes the prompt and sets its blocks in the store as they are computed. D gets them at the same time. "
        f"The user has the first token after {from_p:.0f} ms, when P has computed the prompt. D has the same token "
        f"after {from_d:.0f} ms, and writes the rest of the answer."
    )
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d">',
        '<title id="t">The time of one request: proxy, prefill engine, store, decode engine</title>',
        f'<desc id="d">{escape(described)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
    ]
    for ms in range(0, int(end) + 1, TICK_MS):
        made.append(f'<path class="grid" d="M{x(ms):.1f} {TOP}V{bottom}"/>')
        unit = " ms" if ms == 0 else ""
        made.append(f'<text class="small" x="{x(ms):.1f}" y="{bottom + 18}" text-anchor="middle">{ms}{unit}</text>')
    made += moments(
        x, {f"first token, from P: {from_p:.0f} ms": from_p, f"D has it, too: {from_d:.0f} ms": from_d}, bottom
    )
    for number, (row, (label, names)) in enumerate(ROWS.items()):
        y = TOP + ROW * number + (ROW - BAR) / 2
        made.append(f'<text x="{LABELS - 10}" y="{y + 18:.1f}" text-anchor="end">{escape(label)}</text>')
        for part in parts:
            if part.row == row and part.name in names:
                made += bar(x(part.began), x(part.ended), y, *names[part.name])
    at = float(LABELS)
    for kind, says in LEGEND.items():
        made.append(f'<rect class="{kind}" x="{at}" y="{bottom + 36}" width="14" height="14" rx="2"/>')
        made.append(f'<text class="small" x="{at + 20}" y="{bottom + 47}">{escape(says)}</text>')
        at += 52 + 6.2 * len(says)
    return "\n".join([*made, "</svg>", ""])


def bar(left: float, right: float, y: float, kind: str, says: str) -> list[str]:
    width = max(1.5, right - left)
    made = [f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="3"/>']
    if says:
        made.append(f'<text class="small" x="{left + 8:.1f}" y="{y + 17:.1f}">{escape(says)}</text>')
    return made


def moments(x: Any, times: dict[str, float], bottom: int) -> list[str]:
    """Return vertical lines, with the words of the earlier line to its left."""
    made = []
    for anchor, shift, (says, ms) in zip(("end", "start"), (-6, 6), times.items(), strict=True):
        made.append(f'<path class="moment" d="M{x(ms):.1f} 30V{bottom}"/>')
        made.append(f'<text x="{x(ms) + shift:.1f}" y="42" text-anchor="{anchor}">{escape(says)}</text>')
    return made


def record() -> dict[str, Any]:
    """Send requests through a proxy and two engines. Return the trace of the request of median length."""
    from tests.engine.served import ServedEngine, save_served_model
    from tests.support import forked
    from tests.support.harness import Server, environment, wait_until
    from tests.support.proxies import ProxyProcess

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = Server(folder / "store.log", "--memory", "512MiB")
        stack.callback(store.stop)
        model = save_served_model(folder / "model")
        files = [folder / f"{name}.json" for name in ("proxy", "p", "d")]
        chunks = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
        engines = []
        for file in files[1:]:
            log = file.with_suffix(".log")
            length = PROMPT_TOKENS + 1024
            engine = ServedEngine(model, log, store.endpoint, *chunks, max_model_len=length, trace_file=str(file))
            stack.callback(engine.stop)
            engines.append(engine)
        for engine in engines:
            engine.await_health()
        roles = [f"--prefill={engines[0].url}", f"--decode={engines[1].url}", "--policy=split"]
        proxy = stack.enter_context(
            ProxyProcess(folder / "proxy", f"--store={store.endpoint}", *roles, f"--trace-file={files[0]}")
        )
        for number in range(WARM_UPS + REQUESTS):
            ask(proxy.url, number)
            time.sleep(1)

        def traced(number: int) -> dict[str, Any] | None:
            out = folder / "one.json"
            arguments = ["trace", *map(str, files), "--output", str(out), "--request", f"request-{number}"]
            if forked.run("kvstore_cli", *arguments, env=environment()).returncode:
                return None
            document: dict[str, Any] = json.loads(out.read_bytes())
            rows = {part.row for part in parts_of(document)}
            return document if {"P", "D", "store, from P"} <= rows else None

        found = [
            wait_until(lambda number=number: traced(number), what=f"the trace of request {number}")
            for number in range(WARM_UPS, WARM_UPS + REQUESTS)
        ]
    found.sort(key=lambda document: max(part.ended for part in parts_of(document)))
    return dict(found[len(found) // 2])


def ask(url: str, number: int) -> None:
    """Send a new prompt, and read its answer."""
    from tests.engine.served import MODEL
    from tests.support.proxies import Reading

    chooser = random.Random(number)
    body = {
        "model": MODEL,
        "prompt": [chooser.randrange(300, 4000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    with Reading(url, "/v1/completions", body, **{"x-request-id": f"request-{number}"}) as reading:
        assert list(reading) and reading.done


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        TRACE.write_text(json.dumps(record(), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(TRACE.read_text())))
