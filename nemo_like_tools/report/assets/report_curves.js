// Which curves there are, and the settings of all of them.

const FIRST_CURVES = [
  "train/reward", "validation/accuracy", "validation/reward", "train/loss", "train/grad_norm",
  "train/approx_entropy", "train/token_mult_prob_error", "train/gen_kl_error",
  "train/mean_gen_tokens_per_sample", "train/truncation_rate", "train/failed_reward_share",
  "timing/train/total_step_time",
];
const MOST_SMOOTH = 0.99;

// smooth: the weight of what was before; log: the axis of values; hide: the numbers of runs that are left out
function curveSettings() {
  const { smooth, log, hide } = currentQuery();
  const weight = Math.min(MOST_SMOOTH, Math.max(0, Number(smooth) || 0));
  return { smooth: weight, log: log === "1", hide: new Set((hide ?? "").split(".").filter(Boolean).map(Number)) };
}

function pointsOf({ curves: { steps, values } }, name) {
  const all = steps.map((step, i) => [step, values[name]?.[i]]);
  return all.filter(([, value]) => typeof value === "number");
}

function curve(name) {
  const lines = report.runs.map((run, number) => (
    { run: number, name: run.name, colour: colourOf(number), points: pointsOf(run, name) }));
  return chart(name, meaningOf(name), lines.filter(({ points }) => points.length));
}

function meaningOf(name) {
  return report.meanings[name] ?? "";
}

function latestOf({ curves: { values } }, name) {
  return (values[name] ?? []).findLast((value) => typeof value === "number");
}

// A metric of which every run has one point at most is a number, and no curve.
function isCurve(name) {
  return report.runs.some((run) => pointsOf(run, name).length > 1);
}

function controls(query) {
  const { smooth, log } = curveSettings();
  const value = element("output", { textContent: smooth });
  const slider = element("input", {
    id: "smooth", type: "range", min: 0, max: MOST_SMOOTH, step: 0.01, value: smooth,
    oninput: () => {
      value.textContent = slider.value;
      remember({ smooth: Number(slider.value) ? slider.value : "" });
      redrawAll();
    },
  });
  const logs = element("input", {
    id: "log", type: "checkbox", checked: log,
    onchange: () => { remember({ log: logs.checked ? "1" : "" }); redrawAll(); },
  });
  const named = element("input", {
    id: "curves", type: "search", value: query.curves ?? "", placeholder: "such as kl",
    onchange: () => { go({ ...query, curves: named.value, metric: "" }); },
  });
  const coarse = matchMedia("(pointer: coarse)").matches;
  return element("div", { className: "filters", id: "controls" },
    element("label", {}, "curves whose name contains", named),
    element("label", {}, element("span", {}, "smoothing ", value), slider),
    element("label", {}, "log axis", logs),
    element("span", { className: "hint", textContent: coarse ? "" : "drag to zoom, double click to go back" }));
}

// A click on a run leaves its lines out of all pictures, or draws them again.
function runLegend() {
  const entries = report.runs.map((run, number) => {
    const box = element("input", { type: "checkbox", checked: !curveSettings().hide.has(number) });
    box.onchange = () => {
      const { hide } = curveSettings();
      if (box.checked) hide.delete(number);
      else hide.add(number);
      remember({ hide: [...hide].join(".") });
      redrawAll();
    };
    return element("label", {}, box, swatch(colourOf(number)), run.name);
  });
  return element("div", { className: "legend", id: "legend" }, ...entries);
}

function charts(names) {
  return element("div", { className: "charts" }, ...names.map(curve));
}

// The curves that were asked for, else those that matter most, and all others by the first word of their names.
function curves(query) {
  const all = Object.keys(report.meanings).filter(isCurve), { metric, curves: part } = query;
  if (!all.length) return [];
  const top = [heading("Curves"), severalRuns() ? runLegend() : null, controls(query)];
  if (metric && !all.includes(metric)) top.push(note(`This page has no curve of ${metric}.`, "note absent"));
  if (part) {
    const found = all.filter((name) => name.toLowerCase().includes(part.toLowerCase()));
    return [...top, found.length ? charts(found) : note(`No curve's name contains ${part}.`, "note absent")];
  }
  const first = FIRST_CURVES.filter((name) => all.includes(name) && name !== metric);
  const others = groupBy(all.filter((name) => !FIRST_CURVES.includes(name)), (name) => name.split("/")[0]);
  const asked = all.includes(metric) ? element("div", { className: "charts wide" }, curve(metric)) : null;
  return [...top, asked, charts(first), ...[...others].map(([word, names]) => {
    const details = element("details", { className: "more" },
      element("summary", { textContent: `${word}: ${names.length} more` }));
    details.ontoggle = () => { if (details.children.length === 1) details.append(charts(names)); };
    return details;
  })];
}
