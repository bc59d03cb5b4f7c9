// Where a step's time goes.

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
