// What the pages of the node and of the proxy share: elements, tables, and numbers as text.

export const by = (id) => document.getElementById(id);

export function element(name, content, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...[content].flat());
  return made;
}

export const count = (value) => value.toLocaleString("en");

export const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(value === 1 ? 0 : 1)} %`);

export function took(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

export const number = (text) => element("td", text, "number");

export function rowHeader(content, title) {
  const cell = element("th", content);
  cell.scope = "row";
  if (title) cell.title = title;
  return cell;
}

export function fill(id, rows, empty) {
  const body = by(id).tBodies[0];
  if (!rows.length) {
    const cell = element("td", empty, "empty");
    cell.colSpan = by(id).tHead.rows[0].cells.length;
    rows = [[cell]];
  }
  body.replaceChildren(...rows.map((cells) => element("tr", cells)));
}
