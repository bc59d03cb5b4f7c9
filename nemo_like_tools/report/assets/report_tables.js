// Tables of steps, groups, samples and problems.

const STEP = column("step", "60px", ({ step }) => step);
const MODE = column("mode", "84px", ({ mode }) => mode);
const PROBLEM = [
  column("environment", "1fr", ({ env }) => env),
  column("problem", "1fr", ({ problem }) => problem.name),
];
const PROMPT = column("prompt", "3fr", ({ problem }) => problem.prompt);
const RESULTS = [
  column("samples", "70px", ({ count }) => count),
  column("mean reward", "100px", ({ reward }) => reward),
  column("best", "70px", ({ best }) => best),
  column("mean length", "100px", ({ length }) => length),
  column("failed", "70px", ({ failed }) => failed),
];

function stepsView() {
  const rows = report.runs.flatMap((run, number) => {
    const byShard = groupBy(samples.filter((sample) => sample.run === number), ({ shard }) => shard);
    return run.shards.map(({ mode, step, excerpt_of }, shard) => {
      const of = byShard.get(shard) ?? [];
      const groups = new Set(of.map(({ group }) => group)).size;
      const excerpt = excerpt_of === null ? null : `of ${excerpt_of.toLocaleString("en")}`;
      return { run: number, mode, step, groups, excerpt, ...summaryOf(of) };
    });
  });
  const columns = [
    ...runColumn(), STEP, MODE, column("excerpt", "84px", ({ excerpt }) => excerpt),
    column("groups", "70px", ({ groups }) => groups), ...RESULTS,
  ];
  return [
    note("Every step whose samples were kept, all or an excerpt. A click shows its groups."),
    table("steps", filledColumns(columns, rows), rows, ({ run, mode, step }) => ({ view: "step", run, mode, step })),
  ];
}

function stepView(query) {
  const { run, mode, step } = query;
  const groups = [...groupBy(ofStep(query), ({ group }) => group).values()];
  if (!groups.length) return missing(`samples of ${mode} step ${step}`, stepsThere(run));
  const rows = groups.map((of) => ({ ...of[0], ...summaryOf(of) }));
  const columns = [
    column("group", "60px", ({ group }) => group), PROMPT, ...RESULTS, ...PROBLEM,
  ];
  return [
    heading(`${report.runs[run].name}: ${mode} step ${step}`), note("A click shows a group's samples."),
    table("groups", columns, rows, ({ group }) => ({ view: "group", run, mode, step, group })),
  ];
}

function groupView(query) {
  const { run, mode, step, group } = query;
  const rows = ofGroup(query);
  if (!rows.length) return missing(`group ${group} of ${mode} step ${step}`, stepsThere(run));
  const up = link(`${mode} step ${step}`, { view: "step", run, mode, step });
  return [
    element("div", { className: "note" }, report.runs[run].name, " › ", up, ` › group ${group}`),
    element("pre", { textContent: rows[0].problem.prompt }), sampleTable(rows),
  ];
}

// The steps of which the page has samples, for an address that leads to another one.
function stepsThere(run) {
  const shards = report.runs[run]?.shards;
  if (!shards) return `It has ${report.runs.length} runs.`;
  const of = (mode) => shards.filter((one) => one.mode === mode).map(({ step }) => step).join(", ") || "none";
  return `It has training steps ${of("training")} and validations ${of("validation")} of that run.`;
}

function partsOf({ parts }) {
  return parts.map(([name, value]) => `${name} ${shown(value)}`).join(" · ");
}

function sampleTable(rows) {
  const columns = [
    ...runColumn(), STEP,
    column("reward", "70px", ({ reward }) => reward),
    PROMPT,
    column("response", "3fr", ({ response }) => response),
    column("components", "2fr", partsOf),
    column("outcome", "100px", ({ outcome }) => outcome),
    MODE,
    column("sample", "64px", ({ generation }) => generation),
    column("length", "64px", ({ length }) => length),
    column("failure", "2fr", ({ failure }) => failure && `${failure.kind}: ${failure.reason}`),
    ...PROBLEM,
  ];
  return table("samples", filledColumns(columns, rows), rows, addressOfSample);
}

async function samplesView(query) {
  const of = filtered(samples, query), text = query.response;
  const tell = (done, all) => { tellProgress(`searching responses: ${done} of ${all} steps`); };
  const rows = text ? await withResponse(of, text, tell) : of;
  tellProgress("");
  const count = note(`${rows.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")} samples`);
  count.id = "count";
  const names = Object.keys(FILTERS);
  return [filters(query, [...names, "response"]), count, sampleTable(rows)];
}

function samplesOfProblem({ run, mode, problem: { source, index, env, prompt } }) {
  return { view: "samples", run, mode, env, ...(source === null ? { prompt } : { source, index }) };
}

function problemsView(query) {
  const rows = problemsOf(filtered(samples, query));
  rows.sort((one, other) => compared(one.now, other.now) || compared(one.change, other.change));
  const columns = [
    ...runColumn(), PROMPT,
    column("first", "70px", ({ before }) => before),
    column("latest", "70px", ({ now }) => now),
    column("change", "80px", ({ change }) => change),
    column("steps", "60px", ({ steps }) => steps),
    ...RESULTS, MODE, ...PROBLEM,
  ];
  return [
    filters(query, ["run", "mode", "env", "source", "index", "prompt"]),
    note("Mean rewards at the first and the latest dumped step of each problem, the worst of the latest "
      + "first; a click on “change” sorts by what got worse, a click on a row shows the samples."),
    table("problems", columns, rows, samplesOfProblem),
  ];
}
