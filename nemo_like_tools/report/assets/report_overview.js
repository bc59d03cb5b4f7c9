// The overview: how each run went, what failed, curves.

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

function overview(query) {
  const found = failuresOf(samples).length ? [heading("Failed rewards"), failures()] : [];
  return [
    ...(severalRuns() ? runsHead() : runHead(report.runs[0])),
    ...report.runs.flatMap(missingOf),
    ...report.runs.flatMap(evaluationOf), ...found, ...curves(query), ...singleNumbers(),
    found.length ? null : note(samples.length ? "No reward failed among the samples here." : ""),
  ];
}

// An evaluation's numbers, each with its interval.
function evaluationOf({ name, evaluation }) {
  if (!evaluation) return [];
  const metrics = [...new Set(evaluation.flatMap((group) => Object.keys(group.metrics)))];
  const number = (one) => (one
    ? `${shown(one.value)}${one.interval ? ` [${one.interval.map(shown).join(", ")}]` : ""}` : null);
  const counts = [["problems", "num_problems"], ["answers", "num_answers"], ["not judged", "num_failed_rewards"]];
  const rows = [
    ...metrics.map((metric) => [metric, ...evaluation.map((group) => number(group.metrics[metric]))]),
    ...counts.map(([name, key]) => [name, ...evaluation.map((group) => group[key])]),
  ];
  const head = ["", ...evaluation.map(({ by, name: of }) => (
    by === "all" ? "all problems" : `${by} ${of || "(none)"}`))];
  return [
    heading(severalRuns() ? `Evaluation: ${name}` : "Evaluation"), plainTable("evaluation", head, rows),
    note("In brackets: the interval that covers the number over all such problems in 95% of evaluations."),
  ];
}

// Metrics of which there is one value, which is no curve.
function singleNumbers() {
  const names = Object.keys(report.meanings).filter((name) => (
    !isCurve(name) && report.runs.some((run) => pointsOf(run, name).length)));
  if (!names.length) return [];
  const rows = names.map((name) => ({ name }));
  const columns = [
    column("metric", "270px", ({ name }) => name),
    ...report.runs.map((run) => (
      column(severalRuns() ? run.name : "value", "110px", ({ name }) => latestOf(run, name)))),
    column("meaning", "4fr", ({ name }) => meaningOf(name) || null),
  ];
  return [heading("Numbers of a single step"), table("numbers", columns, rows, () => null)];
}

// What is not on the page of what was dumped, or was not dumped.
function missingOf(run) {
  const missing = [];
  if (!run.shards.length) {
    missing.push("No samples were kept: rollout.excerpt_period and rollout.dump_period keep those of steps.");
  }
  for (const mode of ["training", "validation"]) {
    const steps = run.left_out.filter(([of]) => of === mode).map(([, step]) => step);
    const named = steps.length > 12 ? [...steps.slice(0, 6), "…", ...steps.slice(-3)] : steps;
    if (steps.length) missing.push(`${steps.length} dumped ${mode} steps are left out: ${named.join(", ")}.`);
  }
  const excerpts = run.shards.filter(({ excerpt_of: all }) => all !== null);
  if (excerpts.length) {
    const { shown: some, excerpt_of: all } = excerpts.at(-1);
    missing.push(`Of ${excerpts.length} steps an excerpt was kept, such as ${some} of ${all} samples; `
      + "rollout.dump_period and rollout.dump_validation keep all.");
  }
  for (const { mode, step, shown: some, dumped } of run.shards) {
    const part = `the first ${some} of ${dumped} samples`;
    if (some < dumped) missing.push(`Of ${mode} step ${step} there are ${part}.`);
  }
  return missing.map((text) => note(severalRuns() ? `${run.name}: ${text}` : text, "note left-out"));
}
