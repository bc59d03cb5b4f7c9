// The views, and which of them the address shows: #view=samples&env=...

const TABS = {
  overview: "Overview", steps: "Steps", samples: "Samples", problems: "Problems", times: "Times",
  metrics: "Metrics", configuration: "Configuration",
};
const VIEWS = {
  overview, steps: stepsView, step: stepView, group: groupView, sample: sampleView, samples: samplesView,
  problems: problemsView, times: timesView, metrics: metricsView, configuration: configurationView,
};
const TAB_OF = { step: "steps", group: "steps", sample: "samples" };

function tellProgress(text) {
  document.getElementById("progress").textContent = text;
}

async function show() {
  const address = location.hash, query = currentQuery();
  const isKnown = Object.hasOwn(VIEWS, query.view ?? "overview");
  const view = isKnown ? query.view ?? "overview" : "overview";
  const made = await VIEWS[view]({ ...query, view });
  if (location.hash !== address) return; // another click came meanwhile
  if (!isKnown) made.unshift(...missing(`view ${query.view}`, "This is its overview."));
  document.getElementById("tabs").replaceChildren(...Object.entries(TABS).map(([name, text]) => {
    const className = name === (TAB_OF[view] ?? view) ? "current" : "";
    return Object.assign(link(text, { view: name }), { id: `tab-${name}`, className });
  }));
  forgetCharts();
  document.getElementById("shared").replaceChildren();
  document.getElementById("main").replaceChildren(...made.filter((one) => one !== null));
  document.body.dataset.view = view;
  window.scrollTo(0, 0);
}

load().then(() => {
  const [run] = report.runs;
  document.title = report.runs.map(({ name }) => name).join(", ");
  document.getElementById("title").textContent = severalRuns() ? `${report.runs.length} runs` : run.name;
  document.getElementById("title").title = document.title;
  document.getElementById("drawn-by").textContent = report.library;
  if (!severalRuns()) document.getElementById("title").after(" ", statusOf(run));
  document.getElementById("copy").onclick = copyLink;
  window.onhashchange = show;
  return show();
}).catch((error) => {
  document.getElementById("main").textContent = `This page needs a browser of 2023 or newer: ${error}`;
  throw error;
});
