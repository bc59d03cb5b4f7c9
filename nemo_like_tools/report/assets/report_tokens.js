// The turns of a sample, as text or with a colour for each token.

const NO_COLOUR = "plain text";
const UNSCORED = "The trainer did not score this sample before training, "
  + "so its tokens have no entropy and no difference of engine and trainer.";
const NO_ENTROPIES = "Of this step an excerpt was kept, for which the trainer computes no entropies; "
  + "rollout.dump_period has them computed.";

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
  choice.onchange = () => { remember({ colour: choice.value }); draw(); };
  const { colour } = currentQuery();
  if (colours.has(colour) || colour === NO_COLOUR) choice.value = colour;
  else if (colours.size) choice.value = [...colours.keys()][0];
  draw();
  const label = element("label", {}, "colour of tokens", choice);
  return [element("div", { className: "filters" }, label, key), unscored(content), place];
}

// Says which colours are missing where the trainer gave its tokens no numbers.
function unscored(content) {
  const { text, prev_logprobs: scored, entropies } = content.tokens ?? {};
  if (!text || entropies || (scored && !content.excerpt_of)) return null;
  return element("div", { className: "note", id: "unscored", textContent: scored ? NO_ENTROPIES : UNSCORED });
}

