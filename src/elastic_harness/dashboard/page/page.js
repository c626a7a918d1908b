// The page: keeps what the server sends of a run, and shows it. Whatever comes from a log is set as text.
import { Chart, Group, clock, colour, drawTimeline, short } from "./charts.js";

const get = id => document.getElementById(id);
const run = { name: null, rows: [], fine: null, now: null, crew: null, failures: null, skew: 0, stream: null };
const others = new Map(); // runs that are compared: name -> {rows, fine, stream}
const [FIRST, LAST, T, LOSS, LOW, HIGH, LR, , SPEED] = Array(9).keys();
let control = false, bars = [], listed = "", answered = { text: "", until: 0 };

// ---- elements

/** Make an element. Strings become text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined).map(
    child => child instanceof Node ? child : document.createTextNode(String(child))));
  return made;
}

function coloured(node, name) {
  node.style.setProperty("--key", name);
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...children.filter(Boolean));
}

// ---- values in words

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

const count = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
const percent = value => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
const gib = value => value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
const moment = t => `${new Date(t * 1000).toLocaleDateString()} ${clock(t)}`;
const serverNow = () => Date.now() / 1000 + run.skew;
const placeColour = place => `var(--c${[...place].reduce((sum, c) => sum + c.charCodeAt(0), 0) % 8})`;

// ---- what the server sends

function listen(name, handlers) {
  const stream = new EventSource(`/api/runs/${encodeURIComponent(name)}/events`);
  for (const [part, handle] of Object.entries(handlers)) {
    stream.addEventListener(part, event => handle(JSON.parse(event.data)));
  }
  return stream;
}

function takeRows(of, told) {
  of.rows.splice(told.from, of.rows.length, ...told.rows);
}

function open(name) {
  run.stream?.close();
  for (const other of others.values()) other.stream.close();
  others.clear();
  Object.assign(run, { name, rows: [], fine: null, now: null, crew: null, failures: null });
  group.view = null;
  get("reset").hidden = true;
  get("zoomed").textContent = "";
  if (name === null) return;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  run.stream = listen(name, {
    series: told => { takeRows(run, told); group.draw(); },
    now: told => { run.skew = told.at - Date.now() / 1000; run.now = told; showNow(); },
    crew: told => { run.crew = told; showNow(); },
    failures: told => { run.failures = told; showFailures(); },
    trouble: told => notice(`this run cannot be shown: ${told}`),
  });
  run.stream.onerror = () => { get("seen").textContent = "the server does not answer; trying again"; };
}

async function listRuns() {
  const answer = await fetch("/api/runs").catch(() => null);
  if (!answer?.ok) return;
  const told = await answer.json();
  control = told.control;
  const select = get("runs"), names = told.runs.map(each => each.name);
  if (listed === JSON.stringify([told.runs, run.name])) return;
  listed = JSON.stringify([told.runs, run.name]);
  fill(select, ...told.runs.map(each => {
    const step = each.step === null ? "" : `, step ${each.step}`;
    return el("option", { value: each.name }, `${each.name} (${each.status}${step})`);
  }));
  const wanted = run.name ?? decodeURIComponent(location.hash.slice(1));
  const chosen = names.includes(wanted) ? wanted : names[0] ?? null;
  select.value = chosen ?? "";
  if (chosen !== run.name) open(chosen);
  if (chosen === null) notice("there is no run yet; the page shows the first one when it begins");
  showCompare(names.filter(name => name !== run.name));
}

function notice(text) {
  get("notice").hidden = !text;
  get("notice").textContent = text;
}

// ---- at a glance

function tile(label, value, kind = "", title = "") {
  return el("div", { class: "tile", title }, el("span", {}, label), el("b", { class: kind }, value));
}

function showNow() {
  if (!run.now || !run.crew) return;
  const now = run.now, state = get("state"), words = now.state;
  document.title = `${now.step ?? "–"} · ${now.run}`;
  state.textContent = words;
  state.className = `pill ${now.live || words === "finished" ? "good" : ["failed", "cut off"].includes(words) ? "bad" : ""}`;
  notice([Date.now() < answered.until && answered.text, now.waiting && `waiting: ${now.waiting}`, !now.live && now.message,
    now.damaged && `${now.damaged} lines of the log could not be used`].filter(Boolean).join(" · "));
  const done = now.steps_wanted && now.step !== null ? (now.step + 1) / now.steps_wanted : 0;
  get("progress").firstElementChild.style.width = `${100 * Math.min(1, done)}%`;
  const best = now.best_tokens_per_s, speed = now.tokens_per_s, kept = best && speed ? speed / best : null;
  const saved = now.checkpoints.map(each => each.t), data = now.computed;
  fill(get("tiles"),
    tile("steps", `${count(now.step === null ? 0 : now.step + 1)}${now.steps_wanted ? ` of ${count(now.steps_wanted)}` : ""}`),
    tile("loss", short(now.loss)),
    tile("tokens/s", short(speed), kept !== null && kept < 0.67 ? "warn" : "", "the median of the last 20 steps"),
    tile("of its own best", percent(kept), kept !== null && kept < 0.67 ? "warn" : ""),
    tile("effective training time", percent(now.time.effective), "", "time in which steps were computed that count"),
    tile("failures", count(now.lost.failures), now.lost.failures ? "warn" : ""),
    tile("lost to failures", seconds(now.lost.seconds), "",
      `by so much later came the next new steps; ${now.lost.redone_steps} steps were computed again`),
    tile("workers", `${training().length}${now.workers_wanted ? ` of ${now.workers_wanted}` : ""}`),
    tile("a step", seconds(now.step_s), "", "median"),
    tile("checkpoint age", saved.length ? seconds(Math.max(0, serverNow() - Math.max(...saved))) : "none"),
    tile("epoch", data?.samples ? (data.position / data.samples).toFixed(3) : data ? String(data.epoch) : "–", "",
      data ? `${count(data.position)} samples were read` : ""),
    tile("gradient norm", short(now.grad_norm)),
  );
  showAges();
  showComputed();
  showTime();
  showCheckpoints();
  showMemory();
  showAlarms();
  showControls();
  showCrew();
}

function showAges() {
  const now = run.now;
  if (!now) return;
  const age = now.committed_at ? seconds(Math.max(0, serverNow() - now.committed_at)) : null;
  get("seen").textContent = age ? `last step ${age} ago` : "no step yet";
}

const training = () => run.crew.workers.filter(worker => worker.state === "training");

function showComputed() {
  const told = run.now.computed;
  get("computed").textContent = told
    ? `step ${told.step}: ${told.slots} slots; data position ${count(told.position)}` +
      (told.samples ? ` of ${count(told.samples)} an epoch` : "") : "no step yet";
  fill(get("slots"), ...(told?.by ?? []).map(part => {
    const node = el("div", { title: `${part.member}: slots ${part.first} to ${part.end - 1}` },
      `${part.member} · ${part.end - part.first}`);
    node.style.flex = String(part.end - part.first);
    return coloured(node, placeColour(part.member.replace(/-\d+$/, "")));
  }));
}

const PARTS = [["trained_s", "trained", "--training"], ["start_s", "start", "--starting"],
  ["held_up_s", "held up by failures", "--bad"], ["down_s", "down between launches", "--c1"],
  ["after_s", "since the newest step", "--best"]];

function showTime() {
  const time = run.now.time, all = PARTS.reduce((sum, [name]) => sum + time[name], 0);
  const bar = el("div", { class: "bar" });
  for (const [name, , key] of PARTS) {
    if (!time[name]) continue;
    const part = coloured(el("i"), `var(${key})`);
    part.style.width = `${100 * time[name] / (all || 1)}%`;
    bar.append(part);
  }
  fill(get("time"), bar, ...PARTS.filter(([name]) => time[name]).map(([name, label, key]) =>
    el("div", { class: "row" }, coloured(el("span", { class: "key" }, label), `var(${key})`),
      el("span", {}, `${seconds(time[name])} · ${percent(time[name] / (all || 1))}`))));
}

function table(node, heads, rows) {
  fill(node, el("thead", {}, el("tr", {}, ...heads.map(head => el("th", {}, head)))),
    el("tbody", {}, ...rows.map(cells => el("tr", {}, ...cells.map(
      cell => cell instanceof Node ? el("td", {}, cell) : el("td", {}, cell))))));
}

function showCheckpoints() {
  const told = run.now.checkpoints;
  if (!told.length) fill(get("checkpoints"), el("caption", {}, "none yet"));
  else table(get("checkpoints"), ["tier", "version", "age", "size", "took"], told.map(each =>
    [each.tier, count(each.version), `${seconds(serverNow() - each.t)} ago`,
      each.nbytes ? gib(each.nbytes) : "–", seconds(each.seconds)]));
  if (run.now.not_saved) {
    const [t, event, error] = run.now.not_saved;
    get("checkpoints").append(el("tbody", {}, el("tr", {},
      el("td", { colspan: 5, class: "wide bad-text" }, `${clock(t)} ${event.replaceAll("_", " ")}: ${error}`))));
  }
}

function showMemory() {
  const { pools, workers } = run.now.memory;
  fill(get("memory"), ...pools.flatMap(each => {
    const part = coloured(el("i"), each.used > 0.9 * each.limit ? "var(--bad)" : "var(--accent)");
    part.style.width = `${100 * each.used / each.limit}%`;
    return [el("div", { class: "row" }, el("span", { title: each.pool }, each.pool),
      el("span", {}, `${gib(each.used)} of ${gib(each.limit)}`)), el("div", { class: "bar" }, part)];
  }), ...workers.map(each => el("div", { class: "row" }, el("span", {}, each.member), el("span", {}, gib(each.bytes)))),
  pools.length || workers.length ? null : el("p", {}, "no worker of this run lives on this machine"));
}

function showAlarms() {
  const alarms = run.now.alarms.toReversed();
  fill(get("alarms"), ...alarms.map(each => el("div", { class: "row" },
    el("span", { title: each.message, class: each.severity === "critical" ? "bad-text" : "" },
      `${each.kind}: ${each.message}`), el("span", { class: "faint" }, clock(each.t)))),
  alarms.length ? null : el("p", {}, "none"));
}

// ---- workers

function showCrew() {
  const crew = run.crew, now = run.now;
  const slots = Object.fromEntries((now?.computed?.by ?? []).map(part => [part.member, part.end - part.first]));
  const memory = Object.fromEntries((now?.memory.workers ?? []).map(each => [each.member, each.bytes]));
  const living = crew.workers.filter(worker => now?.live && worker.end === null).sort((one, other) =>
    (one.rank ?? 1e9) - (other.rank ?? 1e9) || one.member.localeCompare(other.member, undefined, { numeric: true }));
  get("workers").hidden = !living.length;
  table(get("workers"), ["rank", "member", "state", "slots", "memory", "pid", "here for", ""], living.map(worker => [
    worker.rank ?? "–", worker.member, coloured(el("span", { class: "key" }, worker.state), `var(--${worker.state})`),
    slots[worker.member] ?? "–", memory[worker.member] ? gib(memory[worker.member]) : "–", worker.pid || "another node",
    seconds(serverNow() - worker.started),
    control && now?.live && worker.pid ? el("button", { class: "danger", onclick: () =>
      ask(`Kill worker ${worker.member} (pid ${worker.pid}) with SIGKILL?`, { command: "kill", worker: worker.member }) },
    "kill") : ""]));
  showRecoveries();
  showTimeline();
}

function showTimeline() {
  const { crew, now } = run, span = Number(get("span").value);
  if (!crew?.workers.length) return;
  const to = now?.live ? serverNow() : Math.max(now?.newest ?? 0, ...crew.workers.map(w => w.ended ?? w.started));
  const from = span ? to - span : Math.min(...crew.workers.map(worker => worker.started));
  const failed = (run.failures?.marks ?? []).map(([t]) => t);
  bars = drawTimeline(get("timeline"), crew, failed, [from, Math.max(to, from + 1)]);
}

get("timeline").addEventListener("pointermove", event => {
  const box = event.target.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const worker = bars.findLast(each => each.worker && x >= each.left && x <= each.right && y >= each.top
    && y < each.bottom)?.worker;
  event.target.title = worker ? `${worker.member}, pid ${worker.pid}: from ${moment(worker.started)}` +
    (worker.ended ? ` to ${moment(worker.ended)}, ${worker.end}` : `, ${worker.state}`) : "";
});

const STAGES = ["--c0", "--c3", "--c5", "--c6", "--c1", "--c4", "--c2", "--c7"];

function showRecoveries() {
  const told = run.crew.recoveries.toReversed().slice(0, 15);
  const totals = told.map(each => each.total_ms).sort((one, other) => one - other);
  const longest = Math.max(1e-9, Math.min(totals.at(-1) ?? 0, 4 * (totals[totals.length >> 1] ?? 0))); // one may be odd
  const names = [...new Set(told.flatMap(each => Object.keys(each.stages)))];
  const key = name => `var(${STAGES[names.indexOf(name) % STAGES.length]})`;
  fill(get("recoveries"), told.length ? el("div", { class: "legend" }, ...names.map(name =>
    coloured(el("span", { class: "key" }, name.replace(/_ms$/, "").replaceAll("_", " ")), key(name)))) : null,
  ...told.flatMap(each => {
    const bar = el("div", { class: "bar" });
    for (const [name, value] of Object.entries(each.stages)) {
      const part = coloured(el("i", { title: `${name.replace(/_ms$/, "")}: ${value.toFixed(1)} ms` }), key(name));
      part.style.width = `${100 * value / Math.max(longest, each.total_ms)}%`;
      bar.append(part);
    }
    return [el("div", { class: "row" }, el("span", {}, `${moment(each.t)}, step ${each.step ?? "–"}`),
      el("span", {}, `${each.total_ms.toFixed(0)} ms`)), bar];
  }), told.length ? null : el("p", {}, "none yet"));
}

// ---- failures

function showFailures() {
  const told = run.failures, list = get("failures");
  const opened = new Set([...list.querySelectorAll("details[open]")].map(node => node.dataset.number));
  get("lost").textContent = told.total > told.episodes.length ? `the newest ${told.episodes.length} of ${told.total}` : "";
  fill(list, ...told.episodes.map(episode => {
    const first = episode.failures.find(each => each.t === episode.t) ?? episode.failures[0];
    const cost = episode.cost_s !== null ? `cost ${seconds(episode.cost_s)}`
      : !episode.interrupted ? "nobody waited" : episode.over_at !== null ? "" : run.now?.live ? "goes on" : "no new step after it";
    const node = el("details", { class: "failure", "data-number": episode.number },
      el("summary", {}, el("b", {}, first.code), el("span", {}, first.name),
        el("span", { class: "faint when" }, `${moment(episode.t)}${cost && ` · ${cost}`}`),
        el("span", { class: "what" }, episode.failures.length > 1
          ? `${first.what} (and ${episode.failures.length - 1} more)` : first.what)),
      ...episode.failures.map(each => tellFailure(each, each.texts)),
      el("div", { class: "told" }, el("dl", {}, ...entry("cost", [costOf(episode)]), ...entry("stages",
        Object.entries(episode.stages).map(([name, value]) => `${name.replace(/_ms$/, "")} ${value.toFixed(1)} ms`)))));
    node.open = opened.has(String(episode.number));
    return node;
  }), told.episodes.length ? null : el("p", {}, "nothing went wrong"));
  group.draw();
  showTimeline();
}

function costOf(episode) {
  const parts = [];
  if (episode.cost_s !== null) parts.push(`${seconds(episode.cost_s)}, by which step ${episode.over_step} came later`);
  if (episode.redone_steps) parts.push(`${episode.redone_steps} steps were computed again`);
  if (episode.restored_version !== null) parts.push(`back to version ${episode.restored_version}`);
  return parts.join("; ") || (episode.interrupted ? "not known" : "no time: nobody waited for it");
}

function entry(heading, lines) {
  if (!lines?.length || !lines[0]) return [];
  return [el("dt", {}, heading), lines.length > 1 ? el("dd", {}, el("ul", {}, ...lines.map(line => el("li", {}, line))))
    : el("dd", {}, lines[0])];
}

function tellFailure(failure, texts = []) {
  const where = [failure.member && `worker ${failure.member}`, failure.node && `node ${failure.node}`,
    failure.step !== null && `step ${failure.step}`, failure.slot !== null && `slot ${failure.slot}`,
    failure.times > 1 && `${failure.times} times`].filter(Boolean).join(", ");
  return el("div", { class: "told" }, el("h3", {}, `${failure.code} ${failure.name}`), el("span", { class: "faint" }, where),
    el("dl", {}, ...entry("what", [failure.what]), ...entry("evidence", failure.evidence),
      ...entry("inferred", [failure.inferred]), ...entry("domain", [`${failure.domain}; the same again would do: ${failure.retry}`]),
      ...entry("done", [failure.done]), ...entry("what to do", failure.next)),
    ...texts.map(name => el("button", { type: "button", onclick: () => showText(name) }, name)),
    ...failure.consequences.map(each => tellFailure(each)));
}

async function showText(name) {
  const dialog = get("text");
  const answer = await fetch(`/api/runs/${encodeURIComponent(run.name)}/text?name=${encodeURIComponent(name)}`);
  dialog.querySelector("h2").textContent = name;
  dialog.querySelector("pre").textContent = await answer.text();
  dialog.showModal();
  const pre = dialog.querySelector("pre"); // of a log the end is what counts
  pre.scrollTop = name.startsWith("logs/") ? pre.scrollHeight : 0;
}

// ---- curves

const line = (of, name, key, value, low, high) =>
  ({ rows: group.view && of.fine ? of.fine : of.rows, name, colour: colour(key), value: row => row[value],
    ...(low ? { low: row => row[low], high: row => row[high] } : {}) });

function each(value, low, high) {
  const names = [...others.keys()];
  return [...names.map((name, at) => line(others.get(name), name, `--c${1 + at % 7}`, value)),
    line(run, others.size ? run.name : "", "--c0", value, low, high)];
}

const marks = () => (run.failures?.marks ?? []).filter(([, step]) => step !== null).map(([, step]) => ({ step }));

const group = new Group(async view => {
  get("reset").hidden = view === null;
  get("zoomed").textContent = view ? `steps ${count(view[0])} to ${count(view[1])}` : "drag to zoom, double-click for all";
  for (const [name, of] of [[run.name, run], ...others]) {
    of.fine = null;
    if (view === null) continue;
    const asked = `first=${Math.max(0, Math.floor(view[0]))}&last=${Math.max(0, Math.ceil(view[1]))}`;
    const answer = await fetch(`/api/runs/${encodeURIComponent(name)}/steps?${asked}`).catch(() => null);
    if (!answer?.ok || group.view !== view) continue;
    const told = await answer.json();
    if (told.rows.length) of.fine = told.rows;
    group.draw();
  }
});
const loss = new Chart(get("loss"), group, () => [...each(LOSS, LOW, HIGH),
  { rows: (run.crew?.validation ?? []).map(([step, value]) => [step, step, 0, value]), name: "validation",
    colour: colour("--c1"), value: row => row[LOSS] }], marks);
new Chart(get("speed"), group, () => {
  const best = run.now?.best_tokens_per_s;
  const ends = run.rows.length && best ? [[run.rows[0][FIRST], run.rows[0][FIRST], best], [run.rows.at(-1)[LAST],
    run.rows.at(-1)[LAST], best]] : [];
  return [{ rows: ends, name: "best", quiet: true, dashed: true, colour: colour("--best"), value: row => row[2] },
    ...each(SPEED)];
}, marks, 0);
new Chart(get("rate"), group, () => each(LR), () => [], 0);

function showCompare(names) {
  get("compare").hidden = !names.length;
  fill(get("compare").lastElementChild, ...names.map(name => {
    const box = el("input", { type: "checkbox", onchange: event => compare(name, event.target.checked) });
    box.checked = others.has(name);
    return el("label", {}, box, ` ${name}`);
  }));
  fill(get("legend"), ...(others.size ? [coloured(el("span", { class: "key" }, run.name), "var(--c0)")] : []),
    ...[...others.keys()].map((name, at) => coloured(el("span", { class: "key" }, name), `var(--c${1 + at % 7})`)));
}

function compare(name, wanted) {
  others.get(name)?.stream.close();
  others.delete(name);
  if (wanted) {
    const other = { rows: [], fine: null };
    other.stream = listen(name, { series: told => { takeRows(other, told); group.draw(); } });
    others.set(name, other);
  }
  showCompare([...get("runs").options].map(option => option.value).filter(each => each !== run.name));
  group.draw();
}

// ---- commands, with --control

function showControls() {
  const node = get("controls");
  node.hidden = !(control && run.now?.live);
  if (node.hidden || node.childElementCount) return;
  const button = (label, question, command) =>
    el("button", { type: "button", class: command === "add" ? "" : "danger", onclick: () => ask(question, { command }) }, label);
  fill(node, button("add worker", "Add one worker?", "add"), " ",
    button("drain", "Let this node leave at the next step boundary?", "drain"), " ",
    button("stop", "Stop the run at the next step boundary, with a checkpoint?", "stop"));
}

function ask(question, order) {
  const dialog = get("ask"), name = run.name;
  dialog.querySelector("p").textContent = `${question} (run ${name})`;
  dialog.returnValue = "no";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    dialog.onclose = null; // the end of an earlier question may still be on its way here, and would order it again
    const answer = await fetch(`/api/runs/${encodeURIComponent(name)}/control`, { method: "POST",
      headers: { "Content-Type": "application/json", "X-Elastic-Harness": "control" }, body: JSON.stringify(order) });
    answered = { text: (await answer.text()).trim(), until: Date.now() + 10000 };
    notice(answered.text);
  };
  dialog.showModal();
}

// ---- the page itself

function theme() {
  const chosen = localStorage.getItem("theme") ?? "system";
  const dark = chosen === "dark" || (chosen === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  get("theme").textContent = chosen;
  group.draw();
  showTimeline();
}

get("theme").addEventListener("click", () => {
  const order = ["system", "light", "dark"], chosen = localStorage.getItem("theme") ?? "system";
  localStorage.setItem("theme", order[(order.indexOf(chosen) + 1) % 3]);
  theme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
get("runs").addEventListener("change", event => { open(event.target.value); listRuns(); });
get("reset").addEventListener("click", () => group.zoom(null));
get("log").addEventListener("change", event => { loss.log = event.target.checked; group.draw(); });
get("span").addEventListener("change", showTimeline);
new ResizeObserver(() => { group.draw(); showTimeline(); }).observe(document.querySelector("main"));
get("zoomed").textContent = "drag to zoom, double-click for all";
theme();
listRuns();
setInterval(listRuns, 5000);
setInterval(() => { showAges(); if (run.now?.live) showTimeline(); }, 1000);
