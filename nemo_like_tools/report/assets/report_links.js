// The address of a view (#view=samples&env=...), links to views, and the button that copies the address.

const SETTINGS = ["smooth", "log", "hide"]; // of all curves: every link keeps them

function currentQuery() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

function addressOf(query) {
  const now = currentQuery();
  const settings = SETTINGS.filter((name) => !(name in query)).map((name) => [name, now[name]]);
  const given = [...Object.entries(query), ...settings];
  return `#${new URLSearchParams(given.filter(([, value]) => !["", null, undefined].includes(value)))}`;
}

function go(query) {
  location.hash = addressOf(query);
}

// Puts a choice into the address without drawing the view anew.
function remember(changes) {
  history.replaceState(null, "", addressOf({ ...currentQuery(), ...changes }));
}

function link(text, query) {
  // The settings may have changed since the link was made.
  const onclick = (event) => { event.currentTarget.href = addressOf(query); };
  return element("a", { href: addressOf(query), textContent: text, onclick });
}

// Gives what stands after the file's name: the file itself may lie elsewhere for whoever gets the link.
function copyLink() {
  const fragment = location.hash || "#view=overview";
  const field = element("input", { id: "link", readOnly: true, value: fragment });
  const said = element("span", { id: "copied", textContent: "copy it, and put it after the file's name" });
  document.getElementById("shared").replaceChildren(field, said);
  field.select();
  navigator.clipboard?.writeText(fragment).then(
    () => { said.textContent = "copied; it goes after the file's name: report.html#…"; }, () => {});
}

// Says that an address leads to something that this page does not have, and what it has instead.
function missing(what, there) {
  return [note(`This page has no ${what}. ${there}`, "note absent")];
}
