// One picture with the lines of all runs, drawn by Bokeh when it comes into sight.

const MOST_POINTS = 40; // a line of more has no dots
const FEW_POINTS = 10; // a line of no more is not smoothed: its average would lag behind all it shows
const TICK = `
  const value = Number(tick.toPrecision(6)), size = Math.abs(value);
  return size >= 1e6 ? value.toExponential() : size >= 1e3 ? value.toLocaleString("en") : String(value);`;
let library = null; // the promise of Bokeh, once a picture is in sight
let isAsked = false; // all pictures are to be drawn with the next frame
const inSight = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    target.isInSight = isIntersecting;
    if (isIntersecting && target.isStale) redraw(target);
  }
}, { rootMargin: "200px" });

async function loadLibrary() {
  for (let number = 0; number < report.scripts; number += 1) {
    document.head.append(element("script", { textContent: await unpackText(`script-${number}`) }));
  }
  return window.Bokeh;
}

// lines: {name, colour, points: [[step, value], ...]}; meaning: what the title says under the mouse
function chart(title, meaning, lines) {
  const head = element("h3", { textContent: title, title: meaning, className: meaning ? "explained" : "" });
  const plot = element("div", { className: "plot" }), said = element("div", { className: "reading" });
  Object.assign(plot, { lines, said, isStale: true, view: null, place: null });
  plot.onpointermove = (event) => { point(plot, event); };
  plot.onpointerleave = () => { plot.querySelectorAll(".crosshair, .tip").forEach((one) => one.remove()); };
  inSight.observe(plot);
  return element("div", { className: "chart" }, head, plot, said);
}

// Draws every picture anew with the next frame, those out of sight later.
function redrawAll() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    for (const plot of document.querySelectorAll(".plot")) {
      plot.isStale = true;
      if (plot.isInSight) redraw(plot);
    }
  });
}

function forgetCharts() {
  for (const plot of document.querySelectorAll(".plot")) {
    inSight.unobserve(plot);
    plot.view?.remove();
  }
}

async function redraw(plot) {
  plot.isStale = false;
  library ??= loadLibrary();
  const bokeh = await library, settings = curveSettings(), lines = shownLines(plot.lines, settings);
  plot.shown = lines;
  plot.said.textContent = leftOut(plot.lines, settings);
  if (!lines.length) {
    for (const one of [plot.view, plot.place]) one?.remove();
    Object.assign(plot, { view: null, place: null, drawn: [] });
    plot.said.textContent ||= "its runs are left out";
    return;
  }
  const isSame = plot.view && plot.log === settings.log && plot.drawn.length === lines.length
    && lines.every(({ name }, i) => name === plot.drawn[i].name);
  if (isSame) {
    lines.forEach((line, i) => update(plot.drawn[i], line));
    return;
  }
  const figure = figureOf(bokeh, settings), before = [plot.view, plot.place];
  plot.drawn = lines.map((line) => drawnLine(bokeh, figure, line));
  plot.log = settings.log;
  plot.place = element("div");
  plot.append(plot.place);
  plot.view = await bokeh.Plotting.show(figure, plot.place);
  for (const one of before) one?.remove();
}

// Each visible run with the points that the axis can have, and their average.
function shownLines(lines, { smooth, log, hide }) {
  return lines.filter(({ run }) => !hide.has(run)).map((line) => {
    const raw = log ? line.points.filter(([, value]) => value > 0) : line.points;
    const weight = raw.length > FEW_POINTS ? smooth : 0;
    return { ...line, raw, smooth: weight, average: smoothed(raw, weight) };
  }).filter(({ raw }) => raw.length);
}

function leftOut(lines, { log, hide }) {
  const values = lines.filter(({ run }) => log && !hide.has(run)).flatMap(({ points }) => points);
  const count = values.filter(([, value]) => value <= 0).length;
  return count ? `${count} values of 0 or less, which a log axis cannot have, are left out` : "";
}

function figureOf(bokeh, { log }) {
  const style = getComputedStyle(document.body);
  const [text, grid] = ["--soft-text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const tools = matchMedia("(pointer: coarse)").matches ? [] : "box_zoom";
  const figure = bokeh.Plotting.figure({
    height: 210, sizing_mode: "stretch_width", tools, toolbar_location: null, min_border: 2,
    y_axis_type: log ? "log" : "linear", background_fill_color: null, border_fill_color: null,
    outline_line_color: null, lod_threshold: null,
  });
  for (const axis of [...figure.xaxis, ...figure.yaxis]) {
    Object.assign(axis, {
      major_label_text_color: text, major_label_text_font_size: "11px", axis_line_color: grid,
      major_tick_line_color: grid, minor_tick_line_color: null,
    });
  }
  for (const one of [...figure.xgrid, ...figure.ygrid]) one.grid_line_color = grid;
  for (const axis of figure.xaxis) axis.ticker.min_interval = 1; // steps are whole
  if (!log) for (const axis of figure.yaxis) axis.formatter = new bokeh.CustomJSTickFormatter({ code: TICK });
  figure.on_event("doubletap", () => figure.reset.emit());
  return figure;
}

function drawnLine(bokeh, figure, line) {
  const raw = new bokeh.ColumnDataSource({ data: { x: [], y: [] } });
  const average = new bokeh.ColumnDataSource({ data: { x: [], y: [] } });
  const [x, y, colour] = [{ field: "x" }, { field: "y" }, line.colour];
  const of = (source, line_width) => figure.line(x, y, { source, line_color: colour, line_width });
  const drawn = { name: line.name, raw, average, faint: of(raw, 1), strong: of(average, 1.8) };
  if (line.raw.length <= MOST_POINTS) {
    drawn.dots = figure.scatter(x, y, { source: raw, size: 5, fill_color: colour, line_color: null });
  }
  update(drawn, line);
  return drawn;
}

function update(drawn, line) {
  const columns = (points) => ({ x: points.map(([step]) => step), y: points.map(([, value]) => value) });
  drawn.raw.data = columns(line.raw);
  drawn.average.data = columns(line.average);
  drawn.faint.glyph.line_alpha = line.smooth ? 0.3 : 0;
  if (drawn.dots) drawn.dots.glyph.fill_alpha = line.smooth ? 0.3 : 1;
}

// Shows a line at the step nearest to the mouse, and what each run has there.
function point(plot, event) {
  const frame = plot.view?.frame, lines = plot.shown ?? [];
  if (!frame || !lines.length) return;
  const box = plot.getBoundingClientRect();
  const asked = frame.x_scale.invert(event.clientX - box.left);
  const step = nearest(lines.flatMap(({ raw }) => raw), asked)[0], x = frame.x_scale.compute(step);
  if (x < frame.bbox.left || x > frame.bbox.right) return;
  const rows = lines.map(({ name, colour, raw, average, smooth }) => {
    const [at, value] = nearest(raw, step), [, mean] = nearest(average, step);
    const values = smooth ? `${shown(value)} (smoothed ${shown(mean)})` : shown(value);
    const text = severalRuns() ? `${name}: ${values}` : values;
    return element("div", {}, swatch(colour), at === step ? text : `${text} at step ${at}`);
  });
  const tip = element("div", { className: "tip" }, element("b", { textContent: `step ${step}` }), ...rows);
  const line = element("div", { className: "crosshair" });
  const { top, height } = frame.bbox;
  Object.assign(line.style, { left: `${x}px`, top: `${top}px`, height: `${height}px` });
  plot.querySelectorAll(".crosshair, .tip").forEach((one) => one.remove());
  plot.append(line, tip);
  const beside = x > box.width / 2 ? x - tip.offsetWidth - 10 : x + 10;
  tip.style.left = `${Math.max(0, Math.min(beside, box.width - tip.offsetWidth))}px`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot")) plot.log = undefined;
  redrawAll();
});
