// What is known of each run as a whole: how it goes, where, with which software.

const severalRuns = () => report.runs.length > 1;
const runColumn = () => (severalRuns() ? [column("run", "1fr", ({ run }) => report.runs[run].name)] : []);

// Facts for which a table of several runs has no room; how versions differ is beside the configurations.
const OF_ONE_RUN = ["began", "Python", "packages"];

function statusOf({ state: { status } }) {
  return element("span", { className: `status ${status}`, textContent: status });
}

function commitOf({ state: { software } }) {
  if (!software?.commit) return null;
  return `${software.commit.slice(0, 10)}${software.has_changes ? ", with changes" : ""}`;
}

function hostOf({ state: { process } }) {
  return process?.replace(/^process \d+ on host /, "") ?? null;
}

// [name, value] pairs; a value that the run directory does not have is null.
function factsOf(run) {
  const { state, curves: { steps } } = run, { software } = state;
  const packages = Object.entries(software?.packages ?? {});
  const main = ["torch", "vllm", "ray", "transformers", "megatron-core"];
  return [
    ["duration", state.seconds === null ? null
      : `${shownSeconds(state.seconds)}${state.starts > 1 ? ` in ${state.starts} starts` : ""}`],
    ["began", state.began === null ? null : shownTime(state.began)],
    ["latest step", steps.at(-1)],
    ["reward", latestOf(run, "train/reward")],
    ["held-out accuracy", latestOf(run, "validation/accuracy")],
    ["host", hostOf(run)],
    ["commit", commitOf(run)],
    ["Python", software?.python],
    ["packages", packages.length
      ? packages.filter(([name]) => main.includes(name)).map(([name, one]) => `${name} ${one}`).join(", ") : null],
  ];
}

function runHead(run) {
  const cards = factsOf(run).filter(([, value]) => (value ?? null) !== null).map(([name, value]) => (
    element("div", { className: "card" }, name,
      element("b", {}, value instanceof Node ? value : shown(value)))));
  return [
    element("div", { className: "cards" }, ...cards), outcomeOf(run), packagesOf(run),
  ];
}

function outcomeOf({ state: { outcome, status } }) {
  if (!outcome || outcome === "finished") return null;
  return note(`The run ${outcome}${outcome.endsWith(".") ? "" : "."}`, status === "stopped" ? "note" : "note bad");
}

function packagesOf({ state: { software } }) {
  const packages = Object.entries(software?.packages ?? {});
  if (!packages.length) return null;
  return element("details", { className: "more" },
    element("summary", { textContent: `versions of ${packages.length} packages` }),
    element("p", { textContent: packages.map(([name, one]) => `${name} ${one}`).join(", ") }));
}

function runsHead() {
  const all = report.runs.flatMap(factsOf).filter(([name, value]) => (
    (value ?? null) !== null && !OF_ONE_RUN.includes(name)));
  const names = [...new Set(all.map(([name]) => name))];
  const rows = report.runs.map((run, number) => {
    const facts = Object.fromEntries(factsOf(run));
    const name = element("span", {}, swatch(colourOf(number)), run.name);
    return [name, statusOf(run), ...names.map((one) => facts[one] ?? null)];
  });
  return [plainTable("runs", ["run", "status", ...names], rows), ...report.runs.map(outcomeOf)];
}
