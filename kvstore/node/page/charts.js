// Line charts of a few lists of numbers over time, as SVG. A chart is drawn again with each update and when its
// width changes; a pointer over it shows the values at that time.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 66, RIGHT = 10, TOP = 8, BOTTOM = 22;

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The next of 1, 2, 5, 10 … above a number, so that the axis does not jump with every poll.
function ceiling(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most);
}

export class Chart {
  // lines: names of one or two lines. format: makes text of a number. most: the axis' end; default: what they need.
  constructor(figure, lines, format, most) {
    this.lines = lines;
    this.format = format;
    this.most = most;
    this.time = [];
    this.values = lines.map(() => []);
    this.pointed = null;
    this.legends = lines.map((name, at) => {
      const legend = document.createElement("span");
      legend.className = at ? "legend second" : "legend";
      legend.append(document.createElement("i"), document.createTextNode(""));
      figure.querySelector("figcaption").append(legend);
      return legend;
    });
    this.svg = shape("svg", { role: "img" });
    figure.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  update(time, ...values) {
    this.time = time;
    this.values = values;
    this.draw();
  }

  point(x) {
    this.pointed = x;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    const count = this.time.length;
    if (!width || !count) return;
    const end = this.time[count - 1], span = 300;
    const most = this.most ?? ceiling(Math.max(0, ...this.values.flat().filter((value) => value !== null)));
    const x = (time) => width - RIGHT - ((end - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * most);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(shape("text", { class: "label", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.format(share * most)));
    }
    for (const minutes of [4, 2, 0]) {
      const text = minutes ? `${minutes} min ago` : "now";
      parts.push(shape("text", { class: "label", x: x(end - minutes * 60), y: HEIGHT - 5, "text-anchor": minutes ? "middle" : "end" }, text));
    }
    let shown = count - 1;
    if (this.pointed !== null) {
      for (let at = 0; at < count; at++) {
        if (Math.abs(x(this.time[at]) - this.pointed) < Math.abs(x(this.time[shown]) - this.pointed)) shown = at;
      }
      const at = x(this.time[shown]);
      parts.push(shape("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    const said = this.lines.map((name, line) => {
      let path = "", pen = "M";
      this.values[line].forEach((value, at) => {
        if (value === null) { pen = "M"; return; }
        path += `${pen}${x(this.time[at]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      const second = line ? " second" : "";
      if (path) parts.push(shape("path", { class: `line${second}`, d: path }));
      const value = this.values[line][shown];
      if (value !== null) parts.push(shape("circle", { class: `dot${second}`, cx: x(this.time[shown]), cy: y(value), r: 3 }));
      const text = `${name} ${value === null ? "–" : this.format(value)}`.trim();
      this.legends[line].lastChild.data = text;
      return text;
    });
    const when = this.pointed === null ? "now" : `${Math.round(end - this.time[shown])} s ago`;
    this.svg.setAttribute("aria-label", `The last five minutes; ${when}: ${said.join(", ")}`);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
  }
}
