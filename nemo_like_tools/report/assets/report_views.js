// The views, and which of them the address shows: #view=samples&env=...

const TABS = {
  overview: "Overview", steps: "Steps", samples: "Samples", problems: "Problems", times: "Times",
  metrics: "Metrics",
};
const FIRST_CURVES = [
  "train/reward", "validation/accuracy", "validation/reward", "train/loss", "train/grad_norm",
  "train/approx_entropy", "train/token_mult_prob_error", "train/gen_kl_error",
  "train/mean_gen_tokens_per_sample", "train/truncation_rate", "train/failed_reward_share",
  "timing/train/total_step_time",
];

const severalRuns = () => report.runs.length > 1;
const column = (name, width, of) => ({ name, width, of });
const runColumn = () => (severalRuns() ? [column("run", "1fr", ({ run }) => report.runs[run].name)] : []);
const STEP = column("step", "60px", ({ step }) => step);
const MODE = column("mode", "84px", ({ mode }) => mode);
const PROBLEM = [
  column("environment", "minmax(110px, 1fr)", ({ env }) => env),
  column("problem", "minmax(110px, 1fr)", ({ problem }) => problem.name),
  column("prompt", "3fr", ({ problem }) => problem.prompt),
];
const RESULTS = [
  column("samples", "70px", ({ count }) => count),
  column("mean reward", "100px", ({ reward }) => reward),
  column("best", "70px", ({ best }) => best),
  column("mean length", "100px", ({ length }) => length),
  column("failed", "70px", ({ failed }) => failed),
];

function note(text, className = "note") {
  return element("div", { className, textContent: text });
}

function heading(text) {
  return element("h2", { textContent: text });
}

function colourOf(number) {
  return COLOURS[number % COLOURS.length];
}

function curve(name) {
  const lines = report.runs.map((run, number) => {
    const values = run.curves.values[name] ?? [];
    const all = run.curves.steps.map((step, i) => [step, values[i]]);
    const points = all.filter(([, value]) => typeof value === "number");
    return { name: run.name, colour: colourOf(number), points };
  }).filter(({ points }) => points.length);
  return lines.length ? chart(name, meaningOf(name), lines) : null;
}

function meaningOf(name) {
  return report.meanings[name] ?? "";
}

function latestOf({ curves: { values } }, name) {
  return (values[name] ?? []).findLast((value) => typeof value === "number");
}

// The curve that was asked for, then those that matter most.
function curves(asked) {
  const names = Object.keys(report.meanings);
  const first = asked ? [asked, ...FIRST_CURVES.filter((name) => name !== asked)] : FIRST_CURVES;
  const charts = element("div", { className: "charts" }, ...first.map(curve));
  const options = ["another curve …", ...names].map((name) => element("option", { textContent: name }));
  const choice = element("select", { id: "metric" }, ...options);
  choice.onchange = () => {
    const made = curve(choice.value);
    if (made) charts.prepend(made);
  };
  return [heading("Curves"), choice, charts];
}

function failures() {
  const rows = failuresOf(samples);
  if (!rows.length) return note(samples.length ? "none among the samples here" : "no samples here");
  const columns = [
    ...runColumn(),
    column("environment", "1fr", ({ env }) => env),
    column("kind", "110px", ({ kind }) => kind),
    MODE,
    column("samples", "80px", ({ count }) => count),
    column("latest step", "90px", ({ latest }) => latest),
    column("for example", "4fr", ({ reason }) => reason),
  ];
  const target = ({ run, mode, env, kind }) => ({ view: "samples", run, mode, env, failure: kind });
  return table("failures", columns, rows, target);
}

function overview({ metric }) {
  const runs = report.runs.map((run, number) => [run.name, colourOf(number)]);
  return [
    ...report.runs.flatMap(runCards), severalRuns() ? legend(runs) : null,
    heading("Failed rewards"), failures(), ...curves(metric),
  ];
}

function runCards(run, number) {
  const cards = [
    ["latest step", run.curves.steps.at(-1)],
    ["reward", latestOf(run, "train/reward")],
    ["held-out accuracy", latestOf(run, "validation/accuracy")],
    ["samples here", samples.filter((sample) => sample.run === number).length],
  ].map(([name, value]) => (
    element("div", { className: "card" }, name, element("b", { textContent: shown(value) }))));
  return [
    severalRuns() ? heading(run.name) : null, element("div", { className: "cards" }, ...cards),
    ...missingOf(run).map((text) => note(text, "note left-out")),
  ];
}

// What is not on the page of what was dumped, or was not dumped.
function missingOf(run) {
  const missing = [];
  if (!run.shards.length) {
    missing.push("No samples were dumped: rollout.dump_period=1 and rollout.dump_validation=true keep them.");
  }
  for (const mode of ["training", "validation"]) {
    const steps = run.left_out.filter(([of]) => of === mode).map(([, step]) => step);
    const named = steps.length > 12 ? [...steps.slice(0, 6), "…", ...steps.slice(-3)] : steps;
    if (steps.length) missing.push(`${steps.length} dumped ${mode} steps are left out: ${named.join(", ")}.`);
  }
  for (const { mode, step, shown: some, dumped } of run.shards) {
    const part = `the first ${some} of ${dumped} samples`;
    if (some < dumped) missing.push(`Of ${mode} step ${step} there are ${part}.`);
  }
  return missing;
}

function stepsView() {
  const rows = report.runs.flatMap((run, number) => {
    const byShard = groupBy(samples.filter((sample) => sample.run === number), ({ shard }) => shard);
    return run.shards.map(({ mode, step }, shard) => {
      const of = byShard.get(shard) ?? [];
      const groups = new Set(of.map(({ group }) => group)).size;
      return { run: number, mode, step, groups, ...summaryOf(of) };
    });
  });
  const columns = [...runColumn(), STEP, MODE, column("groups", "80px", ({ groups }) => groups), ...RESULTS];
  return [
    note("Every step whose samples were dumped. A click shows its groups."),
    table("steps", columns, rows, ({ run, mode, step }) => ({ view: "step", run, mode, step })),
  ];
}

function stepView(query) {
  const { run, mode, step } = query;
  const groups = [...groupBy(ofStep(query), ({ group }) => group).values()];
  if (!groups.length) return [note("This page has no such step.")];
  const rows = groups.map((of) => ({ ...of[0], ...summaryOf(of) }));
  const columns = [column("group", "60px", ({ group }) => group), ...PROBLEM, ...RESULTS];
  return [
    heading(`${report.runs[run].name}: ${mode} step ${step}`), note("A click shows a group's samples."),
    table("groups", columns, rows, ({ group }) => ({ view: "group", run, mode, step, group })),
  ];
}

function groupView(query) {
  const { run, mode, step, group } = query;
  const rows = ofGroup(query);
  if (!rows.length) return [note("This page has no such group.")];
  const up = link(`${mode} step ${step}`, { view: "step", run, mode, step });
  return [
    element("div", { className: "note" }, report.runs[run].name, " › ", up, ` › group ${group}`),
    element("pre", { textContent: rows[0].problem.prompt }), sampleTable(rows),
  ];
}

function sampleTable(rows) {
  const columns = [
    ...runColumn(), STEP, MODE, ...PROBLEM,
    column("sample", "64px", ({ generation }) => generation),
    column("reward", "70px", ({ reward }) => reward),
    column("length", "70px", ({ length }) => length),
    column("outcome", "120px", ({ outcome }) => outcome),
    column("failure", "2fr", ({ failure }) => failure && `${failure.kind}: ${failure.reason}`),
  ];
  return table("samples", columns, rows, addressOfSample);
}

// What a field offers: [value, text] pairs of what the samples have; undefined for a field to write into.
function optionsOf(name) {
  if (name === "run") return report.runs.map((run, number) => [number, run.name]);
  if (!["mode", "env", "source", "outcome", "failure"].includes(name)) return undefined;
  const of = name === "failure" ? ({ failure }) => failure?.kind : (sample) => sample[name];
  const values = [...new Set(samples.map(of))].filter((value) => (value ?? null) !== null).sort();
  return [...(name === "failure" ? [["any", "any failure"]] : []), ...values.map((value) => [value, value])];
}

function filterField(name, query) {
  const id = `filter-${name}`, options = optionsOf(name), value = query[name] ?? "";
  const onchange = (event) => { location.hash = addressOf({ ...query, [name]: event.target.value }); };
  if (!options) {
    const type = name === "prompt" ? "search" : "number";
    return element("input", { id, type, step: "any", value, onchange });
  }
  const offered = [["", "all"], ...options];
  const field = element("select", { id, onchange }, ...offered.map(([given, text]) => (
    element("option", { value: given, textContent: text }))));
  field.value = value;
  return field;
}

// Fields that change the address.
function filters(query, names) {
  const labels = { env: "task (environment)", prompt: "prompt contains" };
  const fields = names.filter((name) => name !== "run" || severalRuns()).map((name) => (
    element("label", {}, labels[name] ?? name.replace("_", " "), filterField(name, query))));
  const onclick = () => { location.hash = addressOf({ view: query.view }); };
  const all = element("button", { textContent: "all", onclick });
  return element("div", { className: "filters" }, ...fields, all);
}

function samplesView(query) {
  const rows = filtered(samples, query);
  const count = note(`${rows.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")} samples`);
  count.id = "count";
  return [filters(query, Object.keys(FILTERS)), count, sampleTable(rows)];
}

function samplesOfProblem({ run, mode, problem: { source, index, env, prompt } }) {
  return { view: "samples", run, mode, env, ...(source === null ? { prompt } : { source, index }) };
}

function problemsView(query) {
  const rows = problemsOf(filtered(samples, query));
  rows.sort((one, other) => compared(one.now, other.now) || compared(one.change, other.change));
  const columns = [
    ...runColumn(), MODE, ...PROBLEM,
    column("steps", "60px", ({ steps }) => steps),
    column("first", "70px", ({ before }) => before),
    column("latest", "70px", ({ now }) => now),
    column("change", "80px", ({ change }) => change),
    ...RESULTS,
  ];
  return [
    filters(query, ["run", "mode", "env", "source", "index", "prompt"]),
    note("Mean rewards at the first and the latest dumped step of each problem, the worst of the latest "
      + "first; a click on “change” sorts by what got worse, a click on a row shows the samples."),
    table("problems", columns, rows, samplesOfProblem),
  ];
}

function timesView() {
  return report.runs.flatMap((run) => [severalRuns() ? heading(run.name) : null, ...timesOf(run)]);
}

// One row per timed step: seconds of each stage, and shares of the step in which engines or workers idled.
function timedSteps({ steps, values }, stages) {
  return steps.map((step, i) => {
    const of = (name) => values[name]?.[i] ?? null;
    const total = of("timing/train/total_step_time");
    const parts = Object.fromEntries(stages.map((stage) => [stage, of(`timing/train/${stage}`) ?? 0]));
    const rest = total - Object.values(parts).reduce((sum, part) => sum + part, 0);
    const idle = (busy) => (of(busy) === null ? null : 1 - of(busy) / total);
    return {
      step, total, ...parts, other: Math.max(0, rest), engines: idle("performance/generation_s"),
      workers: idle("performance/worker_compute_s"), overhead: of("performance/overhead_share"),
    };
  }).filter(({ total }) => total !== null);
}

function timesOf(run) {
  const timed = report.stages.filter((stage) => run.curves.values[`timing/train/${stage}`]);
  const rows = timedSteps(run.curves, timed), stages = [...timed, "other"];
  if (!rows.length) return [note("No step was timed.")];
  const percent = (value) => (value === null ? null : `${(value * 100).toFixed(1)} %`);
  const columns = [
    STEP, column("total s", "80px", ({ total }) => total),
    ...stages.map((stage) => column(stage, "1fr", (row) => row[stage])),
    column("engines idle", "100px", ({ engines }) => percent(engines)),
    column("workers idle", "100px", ({ workers }) => percent(workers)),
    column("overhead", "90px", ({ overhead }) => percent(overhead)),
  ];
  return [
    heading("Stages of each step, seconds"), legend(stages.map((stage, i) => [stage, colourOf(i)])),
    stageBars(rows, stages),
    note("Idle is the share of a step in which no engine generated, or in which no worker's model computed; "
      + "in the overhead neither did."),
    table("times", columns, rows, () => null),
  ];
}

// A bar per step, or per several neighbouring steps (their mean) where there are more than fit.
function stageBars(rows, stages) {
  const width = 1200, height = 200, size = Math.ceil(rows.length / 300);
  const starts = rows.map((_, i) => i).filter((i) => i % size === 0);
  const bars = starts.map((start) => rows.slice(start, start + size));
  const seconds = (of, name) => mean(of.map((row) => row[name]));
  const most = Math.max(...bars.map((of) => seconds(of, "total")));
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", id: "stages" });
  bars.forEach((of, i) => {
    const steps = of.length > 1 ? `steps ${of[0].step} to ${of.at(-1).step}` : `step ${of[0].step}`;
    let y = height;
    stages.forEach((stage, number) => {
      const tall = seconds(of, stage) / most * (height - 4);
      y -= tall;
      const text = `${steps}: ${stage} ${shown(seconds(of, stage))} s of ${shown(seconds(of, "total"))} s`;
      const place = { x: i * width / bars.length, y, width: width / bars.length * 0.95, height: tall };
      svg.append(shape("rect", { ...place, fill: colourOf(number) }, shape("title", {}, text)));
    });
  });
  return element("div", { className: "chart wide" }, svg);
}

function metricsView() {
  const rows = Object.keys(report.meanings).map((name) => ({ name }));
  const columns = [
    column("metric", "2fr", ({ name }) => name),
    ...report.runs.map((run) => (
      column(severalRuns() ? run.name : "latest", "90px", ({ name }) => latestOf(run, name)))),
    column("meaning", "4fr", ({ name }) => meaningOf(name) || null),
  ];
  const page = element("a", { href: report.metrics_page, textContent: "docs/reference/metrics.md" });
  return [
    element("div", { className: "note" }, "What each metric means; ", page, " says more, as on what to do when "
      + "trainer and engines disagree. A click shows a metric's curve."),
    table("metrics", columns, rows, ({ name }) => ({ view: "overview", metric: name })),
  ];
}

const VIEWS = {
  overview, steps: stepsView, step: stepView, group: groupView, sample: sampleView, samples: samplesView,
  problems: problemsView, times: timesView, metrics: metricsView,
};
const TAB_OF = { step: "steps", group: "steps", sample: "samples" };

async function show() {
  const address = location.hash;
  const query = Object.fromEntries(new URLSearchParams(address.slice(1)));
  const view = Object.hasOwn(VIEWS, query.view ?? "") ? query.view : "overview";
  const made = await VIEWS[view]({ ...query, view });
  if (location.hash !== address) return; // another click came meanwhile
  document.getElementById("tabs").replaceChildren(...Object.entries(TABS).map(([name, text]) => {
    const className = name === (TAB_OF[view] ?? view) ? "current" : "";
    return Object.assign(link(text, { view: name }), { id: `tab-${name}`, className });
  }));
  document.getElementById("main").replaceChildren(...made.filter((one) => one !== null));
  document.body.dataset.view = view;
  window.scrollTo(0, 0);
}

load().then(() => {
  document.title = report.runs.map(({ name }) => name).join(", ");
  document.getElementById("title").textContent = document.title;
  window.onhashchange = show;
  return show();
}).catch((error) => {
  document.getElementById("main").textContent = `This page needs a browser of 2023 or newer: ${error}`;
  throw error;
});
