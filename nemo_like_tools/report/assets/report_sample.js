// One sample: what it is, its reward, and its turns.

const HIDDEN = new Set([
  "step", "group", "generation", "prompt", "turns", "tokens", "rewards", "failure", "failure_kind", "answer",
  "columns", "images", "excerpt_of",
]);

function facts(content) {
  const known = Object.entries(content).filter(([name]) => !HIDDEN.has(name));
  return element("div", { className: "facts" }, ...known.map(([name, value]) => (
    element("div", {}, element("span", { textContent: name }), shown(value)))));
}

function components(content) {
  const rows = Object.entries(content.rewards).map(([name, value]) => ({ name, value }));
  const columns = [
    column("component of the reward", "2fr", ({ name }) => name),
    column("value", "1fr", ({ value }) => value),
  ];
  return rows.length ? table("components", columns, rows, () => null) : null;
}

function failureOf(content) {
  if (content.failure === null) return null;
  const title = `The reward failed: ${content.failure_kind ?? ""}`;
  return element("div", { id: "failure" }, element("h2", { className: "bad", textContent: title }),
    element("pre", { textContent: content.failure }));
}

// Arrays and objects that columns of the run's own brought, and paths of images.
function more(content) {
  const rest = { ...(content.images ? { images: content.images } : {}), ...(content.columns ?? {}) };
  const names = Object.keys(rest).join(", ");
  if (!names) return null;
  return element("details", {}, element("summary", { textContent: `columns: ${names}` }),
    element("pre", { textContent: JSON.stringify(rest, null, 1) }));
}

// The address of a sample, which stays the same when the page is written again.
function addressOfSample({ run, mode, step, group, generation }) {
  return { view: "sample", run, mode, step, group, generation };
}

function ofStep(query) {
  const { run, mode, step } = query;
  return samples.filter((one) => one.run === Number(run) && one.mode === mode && one.step === Number(step));
}

function ofGroup(query) {
  return ofStep(query).filter(({ group }) => group === Number(query.group));
}

async function sampleView(query) {
  const group = ofGroup(query);
  const sample = group.find(({ generation }) => generation === Number(query.generation));
  if (!sample) {
    const { run, mode, step, group: of, generation } = query;
    return missing(`sample ${generation} of group ${of} of ${mode} step ${step}`, stepsThere(run));
  }
  const content = await contentsOf(sample);
  const { run, mode, step } = sample;
  const siblings = group.map((one) => (one === sample
    ? element("b", { textContent: one.generation }) : link(one.generation, addressOfSample(one))));
  const path = element("div", { className: "note" }, report.runs[run].name, " › ",
    link(`${mode} step ${step}`, { view: "step", run, mode, step }), " › ",
    link(`group ${sample.group}`, { view: "group", run, mode, step, group: sample.group }), " › sample ",
    ...siblings.flatMap((one) => [one, " "]));
  return [path, failureOf(content), facts(content), components(content),
    element("h2", { textContent: "Prompt" }), element("pre", { id: "prompt", textContent: content.prompt }),
    element("h2", { textContent: "Turns" }), ...turns(content),
    element("h2", { textContent: "Expected answer" }),
    element("pre", { id: "answer", textContent: content.answer ?? "" }), more(content)];
}
