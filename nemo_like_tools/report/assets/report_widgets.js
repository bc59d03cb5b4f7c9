// Elements: plain ones, tables of which only the visible rows exist, charts.

const COLOURS = [
  "#1f5fa8", "#d1495b", "#2e8b57", "#c27c0e", "#7b4fa3", "#0e8c9b", "#8c564b", "#5b6672", "#aab42b",
];
const ROW_HEIGHT = 26, MAX_BODY_HEIGHT = 520;
const SVG = "http://www.w3.org/2000/svg";

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const isPlain = Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5;
  return isPlain ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

function addressOf(query) {
  const given = Object.entries(query).filter(([, value]) => !["", null, undefined].includes(value));
  return `#${new URLSearchParams(given)}`;
}

function link(text, query) {
  return element("a", { href: addressOf(query), textContent: text });
}

// columns: {name, width, of(row)}; target(row) is the address that a click on the row leads to, or null.
function table(name, columns, rows, target) {
  const grid = `grid-template-columns: ${columns.map(({ width }) => width).join(" ")}`;
  const head = element("div", { className: "head", style: grid });
  const spacer = element("div");
  const body = element("div", { className: "body" }, spacer);
  body.style.height = `${Math.min(MAX_BODY_HEIGHT, Math.max(1, rows.length) * ROW_HEIGHT)}px`;
  spacer.style.height = `${rows.length * ROW_HEIGHT}px`;
  const drawn = new Map(); // the rows that exist: place among the sorted -> element
  let sorted = rows, order = null, direction = 1;

  function rowAt(place) {
    const row = sorted[place], to = target(row);
    const cells = columns.map(({ of }) => (
      element("span", { textContent: shown(of(row)), title: String(of(row) ?? "") })));
    const style = `${grid}; top: ${place * ROW_HEIGHT}px`;
    const made = element("div", { className: to ? "row" : "row fixed", style }, ...cells);
    if (row.failed || row.failure) made.classList.add("bad");
    if (to) made.onclick = () => { location.hash = addressOf(to); };
    return made;
  }

  // A row that stays keeps its element: a click whose press and release have a draw between them would be
  // lost with the element that was pressed.
  function draw() {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(sorted.length, first + Math.ceil(MAX_BODY_HEIGHT / ROW_HEIGHT) + 10);
    for (const [place, made] of drawn) {
      if (place >= first && place < last) continue;
      made.remove();
      drawn.delete(place);
    }
    let next = spacer.firstChild;
    for (let place = first; place < last; place += 1) {
      if (drawn.has(place)) {
        next = drawn.get(place).nextSibling;
      } else {
        drawn.set(place, rowAt(place));
        spacer.insertBefore(drawn.get(place), next);
      }
    }
  }

  function sortBy(column) {
    direction = order === column ? -direction : 1;
    order = column;
    const keyed = rows.map((row) => [column.of(row), row]);
    keyed.sort(([one], [other]) => compared(one, other) * (one === null || other === null ? 1 : direction));
    sorted = keyed.map(([, row]) => row);
    drawn.clear();
    spacer.replaceChildren();
    draw();
  }

  head.append(...columns.map((column) => (
    element("span", { textContent: column.name, title: "sort", onclick: () => sortBy(column) }))));
  body.onscroll = draw;
  draw();
  return element("div", { className: "table", id: name }, head, body);
}

// Rows without a value come last.
function compared(one, other) {
  if (one === null || one === undefined) return other === null || other === undefined ? 0 : 1;
  if (other === null || other === undefined) return -1;
  return one < other ? -1 : Number(one > other);
}

// lines: {name, colour, points: [[step, value], ...]}; meaning: what the title says under the mouse
function chart(title, meaning, lines) {
  const width = 388, height = 170, left = 54, bottom = 18;
  const points = lines.flatMap((line) => line.points);
  const [x0, x1] = extent(points.map(([x]) => x)), [y0, y1] = extent(points.map(([, y]) => y));
  const x = (value) => left + (value - x0) / (x1 - x0 || 1) * (width - left - 6);
  const y = (value) => height - bottom - (value - y0) / (y1 - y0 || 1) * (height - bottom - 8);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}` });
  for (const value of [y0, (y0 + y1) / 2, y1]) {
    svg.append(shape("line", { x1: left, x2: width, y1: y(value), y2: y(value), stroke: "#e5e8ec" }),
      shape("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" }, shown(value)));
  }
  for (const [value, anchor] of [[x0, "start"], [x1, "end"]]) {
    svg.append(shape("text", { x: x(value), y: height - 4, "text-anchor": anchor }, shown(value)));
  }
  for (const line of lines) {
    const path = line.points.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
    const [px, py] = line.points[0];
    svg.append(line.points.length > 1
      ? shape("polyline", { points: path, fill: "none", stroke: line.colour, "stroke-width": 1.6 })
      : shape("circle", { cx: x(px), cy: y(py), r: 3, fill: line.colour }));
  }
  const reading = element("div", { className: "reading" });
  svg.onmousemove = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width * width - left) / (width - left - 6);
    const at = x0 + inside * (x1 - x0);
    const nearer = (best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
    reading.textContent = lines.map((line) => {
      const [step, value] = line.points.reduce(nearer);
      return `${lines.length > 1 ? `${line.name}, ` : ""}step ${step}: ${shown(value)}`;
    }).join(" · ");
  };
  const head = element("h3", { textContent: title, title: meaning, className: meaning ? "explained" : "" });
  return element("div", { className: "chart" }, head, svg, reading);
}

function extent(values) {
  const wider = ([low, high], value) => [Math.min(low, value), Math.max(high, value)];
  return values.reduce(wider, [Infinity, -Infinity]);
}

function legend(entries) {
  return element("div", { className: "legend" }, ...entries.map(([name, colour]) => element("span", {},
    element("span", { className: "swatch", style: `background: ${colour}` }), name)));
}
