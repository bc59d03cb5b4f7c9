// What each metric means, and where it stands.

function metricsView() {
  const rows = Object.keys(report.meanings).map((name) => ({ name }));
  const columns = [
    column("metric", "270px", ({ name }) => name),
    ...report.runs.map((run) => (
      column(severalRuns() ? run.name : "latest", "90px", ({ name }) => latestOf(run, name)))),
    column("meaning", "4fr", ({ name }) => meaningOf(name) || null),
  ];
  const page = element("a", { href: report.metrics_page, textContent: "docs/reference/metrics.md" });
  return [
    element("div", { className: "note" }, "What each metric means; ", page, " says more, as on what to do when "
      + "trainer and engines disagree. It is a file of the project, no part of this page: the link leads there only "
      + "where the run was made. A click shows a metric's curve."),
    table("metrics", columns, rows, ({ name }) => ({ view: "overview", metric: name })),
  ];
}
