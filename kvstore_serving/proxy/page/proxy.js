// Shows /status of the proxy and keeps it current. Names in it come from engines: they become text, never markup.

import { Chart } from "./charts.js";
import { by, count, element, fill, number, rowHeader, share, took } from "./parts.js";

const PAUSE_MS = 2000;
const PATIENCE_MS = 5000; // for an answer of the proxy

const rate = (value) => Number(value.toFixed(value < 10 ? 1 : 0)).toLocaleString("en");

// ---- tables -----------------------------------------------------------------------------------------------------

function stateOf(engine) {
  if (!engine.healthy) return element("td", engine.why_down || "does not answer", "bad");
  if (engine.silent) return element("td", "silent: it answers checks, but sends no tokens", "bad");
  if (engine.shunned) return element("td", "gets no requests after a failure", "bad");
  return element("td", "up");
}

function engineRow(engine) {
  return [
    rowHeader(engine.url),
    element("td", engine.roles.join(", ")),
    stateOf(engine),
    element("td", engine.models.map((model) => model.name).join(", ") || "–"),
    number(count(engine.running)),
    number(count(engine.queued_tokens)),
    number(count(engine.others_running + engine.others_waiting)),
    element("td", engine.version || "–"),
  ];
}

// ---- the page ---------------------------------------------------------------------------------------------------

const charts = {
  requests: new Chart(by("chart-requests"), [""], rate),
  split: new Chart(by("chart-split"), [""], share, 1),
  ttft: new Chart(by("chart-ttft"), ["median", "p90"], took),
  tokens: new Chart(by("chart-tokens"), [""], rate),
};

function tile(name, value, small) {
  return element("div", [element("dt", name), element("dd", [value, element("small", small)])]);
}

function enginesOf(status) {
  return [...new Map(Object.values(status.pools).flat().map((engine) => [engine.url, engine])).values()];
}

function aboutSplits(status) {
  if (status.policy === "colocate") return "No prompt is split between two engines (policy colocate)";
  if (status.policy === "split") return "Every prompt is split between a prefill and a decode engine (policy split)";
  const least = status.split_from.map((pair) => pair.tokens).filter((tokens) => tokens !== null);
  if (!least.length) return "No prompt is split between two engines now (policy auto)";
  const from = Math.min(...least), to = Math.max(...least);
  return `Prompts are split between a prefill and a decode engine from ${from === to ? count(from) : `${count(from)} to ${count(to)}`} uncached tokens (policy auto)`;
}

function messages(status, engines) {
  const found = [];
  if (status.draining) found.push(["warning", "The proxy is shutting down: it takes no new requests."]);
  const down = engines.filter((engine) => !engine.healthy || engine.silent);
  for (const engine of down) found.push(["bad", `${engine.url} gets no requests: ${engine.why_down || "it sends no tokens"}.`]);
  if (!status.store.answers) found.push(["bad", "The store does not answer: no prompt is split."]);
  for (const pair of status.unpaired) {
    const reasons = [...new Set(pair.prefill.map((each) => each.why))].join(", ");
    found.push([pair.alone ? "warning" : "note", `${pair.decode.url} gets no prompts for ${pair.model} from ${pair.prefill.map((each) => each.url).join(", ")}: ${reasons}.`]);
  }
  for (const pair of status.not_arriving) found.push(["warning", `${pair.decode} does not find the blocks of ${pair.prefill}: no prompt is split for the two, and one is tried again in ${Math.round(pair.tried_again_in_s)} s.`]);
  return found;
}

function showTiles(status, engines) {
  const recent = status.recent;
  const all = { requests: 0, ttft: null };
  const failed = (recent.outcomes.failed ?? 0) + (recent.outcomes.cut ?? 0) + (recent.outcomes.rejected ?? 0);
  const served = recent.latency.filter((row) => row.ttft_p50_s !== null).sort((a, b) => b.requests - a.requests);
  if (served.length) all.ttft = served[0];
  const up = engines.filter((engine) => engine.healthy && !engine.silent && !engine.shunned).length;
  by("tiles").replaceChildren(
    tile("Requests", count(recent.requests), "in five minutes"),
    tile("Running", count(status.in_flight), "now"),
    tile("Split", share(recent.split_share), "of requests, in five minutes"),
    tile("First token", all.ttft ? took(all.ttft.ttft_p50_s) : "–", all.ttft ? `median of ${all.ttft.decision}; p90 ${took(all.ttft.ttft_p90_s)}` : "no stream yet"),
    tile("Cached", share(recent.prompt_tokens ? recent.cached_tokens / recent.prompt_tokens : null), "of prompt tokens"),
    tile("Failed", count(failed), "in five minutes"),
    tile("Engines", `${up} of ${engines.length}`, "take requests"),
  );
}

// A list is replaced only when it has changed, so that a screen reader does not read it out every two seconds.
let shown = "";
function showMessages(found) {
  const text = JSON.stringify(found);
  if (text === shown) return;
  shown = text;
  by("messages").replaceChildren(...found.map(([severity, words]) => element("li", words, `message ${severity}`)));
}

function show(status) {
  const engines = enginesOf(status);
  const found = messages(status, engines);
  const worst = found.some(([severity]) => severity === "bad") ? "bad" : found.some(([severity]) => severity === "warning") ? "warning" : "ok";
  document.title = `${worst === "ok" ? "" : "⚠ "}kvstore proxy`;
  by("about").textContent = aboutSplits(status);
  const verdict = by("verdict");
  verdict.hidden = false;
  verdict.className = worst;
  verdict.textContent = { ok: "All is well", warning: "Needs a look", bad: "Something is wrong" }[worst];
  showMessages(found);
  showTiles(status, engines);
  const { history, slot_s: slot } = status.recent, now = Date.now() / 1000;
  const time = history.requests_per_s.map((_, at) => now - slot * (history.requests_per_s.length - 1 - at));
  charts.requests.update(time, history.requests_per_s);
  charts.split.update(time, history.split_share);
  charts.ttft.update(time, history.ttft_p50_s, history.ttft_p90_s);
  charts.tokens.update(time, history.output_tokens_per_s);
  fill("engines", engines.map(engineRow), "No engine is known.");
  fill("latency", status.recent.latency.map((row) => [
    rowHeader(row.decision), number(count(row.requests)),
    ...["ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s"].map((name) => number(took(row[name]))),
  ]), "There was none.");
}

function lost(reason) {
  const text = reason && `${reason} The numbers below are not current.`;
  if (by("lost").textContent !== text) by("lost").textContent = text;
  by("lost").hidden = !reason;
}

let timer = 0;
// Browsers refuse to fetch an address with a password in it. The page's own address may have one; origin has none.
const STATUS = new URL("status", location.origin + location.pathname);

async function update() {
  clearTimeout(timer);
  try {
    const answer = await fetch(STATUS, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    lost("");
  } catch (error) {
    lost(`The proxy does not answer: ${error.message}.`);
  }
  if (!document.hidden) timer = setTimeout(update, PAUSE_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
update();
