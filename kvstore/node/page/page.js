// Shows /status.json and keeps it current. Names in it come from clients: they become text, never markup.

import { Chart } from "./charts.js";
import { by, count, element, fill, number, rowHeader, share, took } from "./parts.js";

const PAUSE_MS = 1000; // half of the server's time between two polls
const PATIENCE_MS = 5000; // for an answer of the server
const LATE_S = 10; // an older poll is not current any more

// ---- numbers as text --------------------------------------------------------------------------------------------

function scaled(value, step, units) {
  let at = 0;
  while (value >= step && at < units.length - 1) { value /= step; at++; }
  return `${Number(value.toFixed(at && value < 100 ? 1 : 0))} ${units[at]}`.trim();
}
const size = (bytes) => scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const speed = (bytes) => scaled(bytes, 1000, ["B/s", "kB/s", "MB/s", "GB/s"]);
const rate = (value) => (value < 10 ? Number(value.toFixed(1)).toString() : scaled(value, 1000, ["", "k", "M"]));
const percent = (value) => `${Math.round(100 * value)} %`;

function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.round(seconds)} s`;
}

// ---- tables -----------------------------------------------------------------------------------------------------

function filled(used, limit) {
  const bar = element("span", element("span", ""), "bar");
  bar.firstChild.style.width = `${Math.min(100, (100 * used) / (limit || 1))}%`;
  return element("td", [`${size(used)} of ${size(limit)}`, bar]);
}

// The table's head, from the server, names the fields of INFO that have a column.
const COLUMNS = [...by("shards").tHead.rows[0].cells].filter((cell) => cell.dataset.field);
const UNITS = { bytes: size, s: took };

function shardRow(shard) {
  const name = rowHeader(String(shard.shard));
  if (shard.reason) {
    const cell = element("td", `does not answer: ${shard.reason}`, "bad");
    cell.colSpan = by("shards").tHead.rows[0].cells.length - 1;
    return [name, cell];
  }
  const disk = shard.disk;
  return [
    name,
    element("td", `up ${duration(shard.uptime_s)}`),
    number(count(shard.connections)),
    number(share(shard.hit_rate)),
    number(speed(shard.bytes_in_per_s)),
    number(speed(shard.bytes_out_per_s)),
    number(count(shard.blocks)),
    filled(shard.memory_used_bytes, shard.memory_limit_bytes),
    !disk ? element("td", "–") : disk.state === "on" ? filled(disk.used_bytes, disk.limit_bytes) : element("td", disk.state, disk.state === "recovering" ? "" : "bad"),
    ...COLUMNS.map(({ dataset }) => number((UNITS[dataset.unit] ?? count)(shard[dataset.field]))),
  ];
}

function namespaceRow(space) {
  return [
    rowHeader(space.model || "(no name)", space.model),
    element("td", element("code", space.id.slice(0, 12))),
    element("td", space.tenant || "–"),
    number(size(space.block_bytes)),
    number(share(space.hit_rate)),
    number(count(space.blocks)),
    number(size(space.memory_bytes)),
    number(count(space.disk_blocks)),
    number(count(space.created)),
    number(count(space.evicted)),
  ];
}

function tenantRow(tenant) {
  const used = (bytes, limit) => (limit === null ? element("td", size(bytes)) : filled(bytes, limit));
  return [
    rowHeader(tenant.tenant || "(none)"),
    used(tenant.memory_bytes, tenant.memory_limit_bytes),
    number(size(tenant.memory_guaranteed_bytes)),
    used(tenant.disk_bytes, tenant.disk_limit_bytes),
    number(count(tenant.connections)),
    number(count(tenant.refused)),
  ];
}

function memberRow(member) {
  const name = rowHeader(member.node + (member.here ? " (this one)" : ""));
  if (member.metrics && !member.here) {
    const link = element("a", member.node);
    link.href = `http://${member.metrics}/`;
    name.replaceChildren(link);
  }
  return [name, element("td", member.state), element("td", member.zone || "–"), number(count(member.shards)), element("td", member.version)];
}

// ---- the page ---------------------------------------------------------------------------------------------------

const charts = {
  hits: new Chart(by("chart-hits"), [""], percent, 1),
  bytes: new Chart(by("chart-bytes"), ["out", "in"], speed),
  requests: new Chart(by("chart-requests"), [""], rate),
  evicted: new Chart(by("chart-evicted"), ["from memory", "from disk"], rate),
};

const VERDICTS = { ok: "All is well", warning: "Needs a look", bad: "Something is wrong" };

function tile(name, value, small) {
  return element("div", [element("dt", name), element("dd", [value, element("small", small)])]);
}

function sum(rows, field) {
  return rows.reduce((total, row) => total + field(row), 0);
}

function showTiles(status) {
  const up = status.shards.filter((shard) => !shard.reason);
  const disks = up.map((shard) => shard.disk).filter((disk) => disk);
  const asked = status.hits + status.misses;
  const memory = sum(up, (shard) => shard.memory_used_bytes), limit = sum(up, (shard) => shard.memory_limit_bytes);
  const history = status.history, last = history.time.length - 1;
  const tiles = [
    tile("Hit rate", share(asked ? status.hits / asked : null), `${count(asked)} blocks asked for in a minute`),
    tile("Out", speed(history.bytes_out_per_s[last] ?? 0), "to clients"),
    tile("In", speed(history.bytes_in_per_s[last] ?? 0), "from clients"),
    tile("Blocks", count(sum(up, (shard) => shard.blocks)), "in memory"),
    tile("Memory", limit ? percent(memory / limit) : "–", `${size(memory)} of ${size(limit)}`),
  ];
  if (disks.length) {
    const used = sum(disks, (disk) => disk.used_bytes), room = sum(disks, (disk) => disk.limit_bytes);
    tiles.push(tile("Disk", percent(used / (room || 1)), `${size(used)} of ${size(room)}, ${count(sum(disks, (disk) => disk.blocks))} blocks`));
  }
  const clients = Math.max(0, ...up.map((shard) => shard.connections)); // each connects to every shard
  const restarted = status.restarts ? `, ${status.restarts} restarted` : "";
  tiles.push(tile("Shards", `${up.length} of ${status.shards.length}`, `answer${restarted}; ${count(clients)} client${clients === 1 ? "" : "s"}`));
  by("tiles").replaceChildren(...tiles);
}

// A list is replaced only when it has changed, so that a screen reader does not read it out every two seconds.
function showMessages(status) {
  const told = JSON.stringify(status.messages);
  if (showMessages.told === told) return;
  showMessages.told = told;
  const severities = { bad: "Wrong: ", warning: "Look: ", note: "" };
  by("messages").replaceChildren(...status.messages.map((each) => element("li", severities[each.severity] + each.text, `message ${each.severity}`)));
}

function show(status) {
  document.title = `${status.verdict === "ok" ? "" : "⚠ "}kvstore ${status.node}`;
  by("node").textContent = status.node;
  by("about").textContent = `version ${status.version}, up ${duration(status.uptime_s)}`;
  const verdict = by("verdict");
  verdict.hidden = false;
  verdict.className = status.verdict;
  if (verdict.textContent !== VERDICTS[status.verdict]) verdict.textContent = VERDICTS[status.verdict];
  showMessages(status);
  showTiles(status);
  const history = status.history;
  charts.hits.update(history.time, history.hit_rate);
  charts.bytes.update(history.time, history.bytes_out_per_s, history.bytes_in_per_s);
  charts.requests.update(history.time, history.requests_per_s);
  charts.evicted.update(history.time, history.evicted_per_s, history.disk_evicted_per_s);
  fill("shards", status.shards.map(shardRow), "");
  fill("requests", status.requests.map((row) => [
    rowHeader(row.verb), element("td", row.tier), number(count(row.count)), number(took(row.p50_s)), number(took(row.p99_s)),
  ]), "There was none.");
  by("tenants-section").hidden = !status.tenants.length;
  fill("tenants", status.tenants.map(tenantRow), "");
  fill("namespaces", status.namespaces.map(namespaceRow), "The store holds no blocks yet.");
  by("namespaces-about").textContent = "Hit rates are those of the last minute." +
    (status.namespaces_left_out ? ` ${count(status.namespaces_left_out)} more with less traffic are not shown.` : "");
  by("cluster").hidden = !status.cluster;
  if (status.cluster) {
    by("cluster-about").textContent = `This node is ${status.cluster.registered ? status.cluster.state : "not registered"}. The list of members is of epoch ${status.cluster.epoch}.`;
    fill("members", status.cluster.members.map(memberRow), "No member is known.");
  }
  if (!by("settings").rows.length) {
    by("settings").tBodies[0].replaceChildren(...Object.entries(status.settings).map(([name, value]) =>
      element("tr", [rowHeader(name), element("td", value || "not set")])));
  }
}

function lost(reason) {
  const shown = by("lost");
  const text = reason && `${reason} The numbers below are not current.`;
  if (shown.textContent !== text) shown.textContent = text;
  shown.hidden = !reason;
}

let timer = 0;
let newest = { time: 0, at: 0 }; // the newest poll, and when it came: clocks may differ

// Browsers refuse to fetch an address with a password in it. The page's own address may have one; origin has none.
const STATUS = new URL("status.json", location.origin + location.pathname);

// Returns the state. If there is none, shows why and returns null.
async function ask() {
  try {
    const answer = await fetch(STATUS, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.ok) return await answer.json();
    lost(`The server answers ${answer.status}: ${(await answer.text()).trim()}.`);
  } catch (error) {
    lost(`The server does not answer: ${error.message}.`);
  }
  return null;
}

async function update() {
  clearTimeout(timer);
  const status = await ask();
  if (!document.hidden) timer = setTimeout(update, PAUSE_MS);
  if (!status) return;
  const now = performance.now() / 1000;
  if (status.time !== newest.time) newest = { time: status.time, at: now };
  lost(now - newest.at > LATE_S ? `The server has not looked at its shards for ${Math.round(now - newest.at)} s.` : "");
  show(status);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
update();
