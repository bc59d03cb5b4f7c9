// One sample: what it is, its reward, and its turns as text with a colour for each token.

const NO_COLOUR = "plain text";
const UNSCORED = "The trainer did not score this sample before training, "
  + "so its tokens have no entropy and no difference of engine and trainer.";

const HIDDEN = new Set([
  "step", "group", "generation", "prompt", "turns", "tokens", "rewards", "failure", "failure_kind", "answer",
  "columns", "images",
]);

// The colours for which the sample has numbers: name -> {values: per token after the prompt, or null; about}.
function coloursOf(content) {
  const tokens = content.tokens ?? {};
  const { text, generation_logprobs: engine, prev_logprobs: trainer } = tokens;
  const { reference_logprobs: reference, teacher_logprobs: teacher, entropies } = tokens;
  const found = new Map();
  if (!text) return found;
  const add = (name, values, about) => { if (values) found.set(name, { values, about }); };
  const everywhere = (value) => engine.map((one) => (one === null ? null : value));
  const difference = (ones, others) => ones && others
    && ones.map((one, i) => (one === null || others[i] === null ? null : one - others[i]));
  // With a KL in the reward a token's advantage is the sample's less its own KL to go, which is not dumped.
  const isOfSample = typeof content.advantage === "number" && !("kl_scale" in content);
  if (tokens.advantages) add("advantage", tokens.advantages, "of the token, with the critic's");
  else if (isOfSample) add("advantage", everywhere(content.advantage), "of the sample");
  add("engine - trainer", difference(engine, trainer), "log-probs, nats");
  add("entropy", entropies, "of what could have been sampled here, by the trainer, nats");
  add("log-prob", engine, "by the engine, nats");
  add("trainer's log-prob", trainer, "nats");
  add("policy - reference", difference(trainer, reference), "log-probs, nats");
  add("teacher's log-prob", teacher, "nats");
  add("value", tokens.values, "of the tokens before, by the critic");
  add("version", everywhere(content.policy_version), "of the weights that sampled it");
  for (const [name, values] of Object.entries(content.columns ?? {})) {
    const own = Array.isArray(values) ? values.slice(content.num_prompt_tokens) : [];
    const isPerToken = own.length === text.length && own.every((value) => typeof value === "number");
    const sampled = own.map((value, i) => (engine[i] === null ? null : value));
    if (isPerToken) add(name, sampled, "a column of this run's own");
  }
  return found;
}

// Returns [colour of a value, low and high end of the legend's scale].
function scaleOf(values) {
  const [low, high] = extent(values.filter((value) => value !== null));
  if (low < 0 && high > 0) {
    const size = Math.max(-low, high);
    return [(value) => signed(value / size), -size, size];
  }
  if (high <= 0) return [(value) => signed(low ? value / -low : 0), low, 0];
  return [(value) => signed(high ? value / high : 0), 0, high];
}

function signed(share) {
  const strength = Math.min(1, Math.abs(share)) * 0.75;
  return `rgba(${share < 0 ? "209, 73, 91" : "46, 139, 87"}, ${strength.toFixed(3)})`;
}

// Consecutive tokens of one side: [{role, start, stop}, ...]
function passagesOf(tokens) {
  const found = [];
  tokens.generation_logprobs.forEach((mark, i) => {
    const role = mark === null ? "environment" : "assistant";
    if (found.at(-1)?.role === role) found.at(-1).stop = i + 1;
    else found.push({ role, start: i, stop: i + 1 });
  });
  return found;
}

function turnsAsText(content) {
  return content.turns.flatMap(({ role, content: text }) => [
    element("div", { className: "role", textContent: role }),
    element("pre", { className: role, textContent: text })]);
}

function turnsAsTokens(content, colours, chosen) {
  const [colour] = scaleOf(colours.get(chosen).values);
  const describe = (i) => [...colours].map(([name, { values }]) => `${name} ${shown(values[i])}`).join("\n");
  return passagesOf(content.tokens).flatMap(({ role, start, stop }) => {
    const block = element("pre", { className: role });
    for (let i = start; i < stop; i += 1) {
      const value = colours.get(chosen).values[i];
      const className = value === null ? "token observed" : "token";
      const token = element("span", { className, textContent: content.tokens.text[i] });
      if (value !== null) {
        token.style.background = colour(value);
        token.title = describe(i);
      }
      block.append(token);
    }
    return [element("div", { className: "role", textContent: role }), block];
  });
}

function turns(content) {
  const colours = coloursOf(content);
  const options = [NO_COLOUR, ...colours.keys()].map((name) => element("option", { textContent: name }));
  const choice = element("select", { id: "colour" }, ...options);
  const key = element("span", { className: "legend", id: "scale" }), place = element("div", { id: "turns" });
  function draw() {
    if (choice.value === NO_COLOUR) {
      key.replaceChildren();
      place.replaceChildren(...turnsAsText(content));
      return;
    }
    const { values, about } = colours.get(choice.value);
    const [colour, low, high] = scaleOf(values);
    const ends = [low, (low + high) / 2, high].map(colour).join(", ");
    const style = `background: linear-gradient(90deg, ${ends})`;
    const scale = element("span", { className: "scale", style });
    key.replaceChildren(...[shown(low), scale, shown(high), about].map((part) => element("span", {}, part)));
    place.replaceChildren(...turnsAsTokens(content, colours, choice.value));
  }
  choice.onchange = draw;
  if (colours.size) choice.value = [...colours.keys()][0];
  draw();
  const label = element("label", {}, "colour of tokens", choice);
  return [element("div", { className: "filters" }, label, key), unscored(content), place];
}

// Says which colours are missing where the trainer gave its tokens no numbers.
function unscored(content) {
  if (!content.tokens?.text || content.tokens.prev_logprobs) return null;
  return element("div", { className: "note", id: "unscored", textContent: UNSCORED });
}

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
  if (!sample) return [note("This page has no such sample.")];
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
