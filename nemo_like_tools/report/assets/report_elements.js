// Plain elements, and how values are written in them.

const COLOURS = [
  "#2f74c0", "#d1495b", "#2e8b57", "#c27c0e", "#8a63b8", "#0e8c9b", "#a0675b", "#76828e", "#9ca51f",
];
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

function note(text, className = "note") {
  return element("div", { className, textContent: text });
}

function heading(text) {
  return element("h2", { textContent: text });
}

function colourOf(number) {
  return COLOURS[number % COLOURS.length];
}

// "2 h 5 min", "5 min 3 s" or "3 s"
function shownSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const parts = [[Math.floor(seconds / 3600), "h"], [Math.floor(seconds / 60) % 60, "min"], [seconds % 60, "s"]];
  const first = parts.findIndex(([count]) => count);
  const named = parts.map(([count, unit]) => `${Math.floor(count)} ${unit}`);
  return first === -1 ? "0 s" : named.slice(first, first + 2).join(" ");
}

function shownTime(seconds) {
  return seconds === null ? "–" : new Date(seconds * 1000).toLocaleString();
}

function extent(values) {
  const wider = ([low, high], value) => [Math.min(low, value), Math.max(high, value)];
  return values.reduce(wider, [Infinity, -Infinity]);
}

function swatch(colour) {
  return element("span", { className: "swatch", style: `background: ${colour}` });
}

function legend(entries) {
  return element("div", { className: "legend" }, ...entries.map(([name, colour]) => (
    element("span", {}, swatch(colour), name))));
}
