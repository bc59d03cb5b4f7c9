// Tables of which only the visible rows exist. What is wider than the window scrolls sideways within the table.

const ROW_HEIGHT = 26, MAX_BODY_HEIGHT = 520, GAP = 8;
const SMALLEST = { "1fr": 110, "2fr": 130, "3fr": 170, "4fr": 230 }; // px, of columns that grow
const NARROW = 1000; // px; a narrower window has columns in proportion

const column = (name, width, of) => ({ name, width, of });

function smallest(width) {
  if (!SMALLEST[width]) return Number.parseInt(width, 10);
  return Math.round(SMALLEST[width] * Math.max(0.6, Math.min(1, window.innerWidth / NARROW)));
}

// The columns in which a row has a value.
function filledColumns(columns, rows) {
  return columns.filter(({ of }) => rows.some((row) => (of(row) ?? "") !== ""));
}

// columns: {name, width, of(row)}; target(row) is the address that a click on the row leads to, or null.
function table(name, columns, rows, target) {
  const grid = `grid-template-columns: ${columns.map(({ width }) => (
    SMALLEST[width] ? `minmax(${smallest(width)}px, ${width})` : width)).join(" ")}`;
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
    if (to) made.onclick = () => { go(to); };
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

  function sortBy(column, way) {
    [order, direction] = [column, way];
    const keyed = rows.map((row) => [column.of(row), row]);
    keyed.sort(([one], [other]) => compared(one, other) * (one === null || other === null ? 1 : direction));
    sorted = keyed.map(([, row]) => row);
    drawn.clear();
    spacer.replaceChildren();
    draw();
    for (const [i, cell] of [...head.children].entries()) {
      const arrow = columns[i] === order ? (direction > 0 ? " ↑" : " ↓") : "";
      cell.textContent = columns[i].name + arrow;
    }
  }

  function choose(column) {
    sortBy(column, order === column ? -direction : 1);
    remember({ sort: `${name}.${direction}.${column.name}` });
  }

  head.append(...columns.map((column) => (
    element("span", { textContent: column.name, title: "sort", onclick: () => choose(column) }))));
  body.onscroll = draw;
  const [of, way, ...by] = (currentQuery().sort ?? "").split(".");
  const asked = of === name && columns.find((column) => column.name === by.join("."));
  if (asked) sortBy(asked, Number(way) || 1);
  else draw();
  const width = columns.reduce((sum, column) => sum + smallest(column.width) + GAP, GAP);
  const inner = element("div", { className: "inner", style: `min-width: ${width}px` }, head, body);
  return element("div", { className: "table", id: name }, inner);
}

// Rows without a value come last.
function compared(one, other) {
  if (one === null || one === undefined) return other === null || other === undefined ? 0 : 1;
  if (other === null || other === undefined) return -1;
  return one < other ? -1 : Number(one > other);
}

// A table of few rows whose cells take as many lines as they need; rows: lists of texts or elements.
function plainTable(id, head, rows) {
  const line = (tag, cells) => element("tr", {}, ...cells.map((cell) => (
    element(tag, {}, cell instanceof Node ? cell : shown(cell)))));
  return element("div", { className: "sideways" }, element("table", { id, className: "plain" },
    element("thead", {}, line("th", head)), element("tbody", {}, ...rows.map((row) => line("td", row)))));
}
