// The page of `edgetrain dashboard`. What is shown comes over one stream; every name is set as text.
"use strict";

const at = id => document.getElementById(id);
const known = value => value !== null && value !== undefined;

// --- quantities for people: as edgetrain/runs/reports/units.py has them ---

const three = value => Math.abs(value) >= 99.95 ? value.toFixed(0) : value.toFixed(Math.abs(value) >= 9.995 ? 1 : 2);

function size(count) {
  if (!known(count) || count === 0) return "-";
  if (Math.abs(count) < 999.5) return count.toFixed(0) + " B";
  const names = ["B", "kB", "MB", "GB"];
  let place = 0;
  while (Math.abs(count) >= 999.5 && place < names.length - 1) { count /= 1000; place++; }
  return three(count) + " " + names[place];
}

function duration(seconds) {
  if (!known(seconds) || !Number.isFinite(seconds)) return "-";
  if (seconds < 0.9995) return seconds ? three(seconds * 1000) + " ms" : "0 s";
  if (seconds < 59.95) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds), two = number => String(number).padStart(2, "0");
  if (whole < 3600) return Math.floor(whole / 60) + "m" + two(whole % 60) + "s";
  if (whole < 48 * 3600) return Math.floor(whole / 3600) + "h" + two(Math.floor(whole % 3600 / 60)) + "m";
  return (whole / 86400).toFixed(1) + " days";
}

const share = part => known(part) ? (part * 100).toFixed(0) + " %" : "-";
const plain = value => known(value) ? String(Number(value.toPrecision(4))) : "-";

// --- acting: only where the dashboard was started with --control ---

const acts = document.body.classList.contains("acts");
const WORDS = {
  pause: "paused: no round closes",
  "resume": "resumed",
  stop: "the job ends: members are told so",
  remove: "is removed",
};
let asking = null;

async function tell(...words) {
  answered("…", false);
  for (const button of document.querySelectorAll("#control button")) button.disabled = true;
  try {
    const answer = await fetch(addressOf("control/"), { method: "POST", headers: { "X-Edgetrain": "1" }, body: JSON.stringify(words) });
    const said = await (answer.headers.get("content-type") === "application/json" ? answer.json() : answer.text());
    if (answer.ok) answered([...words.slice(1), WORDS[words[0]], `(round ${said.round}, ${said.members.length} members are in)`].join(" "), false);
    else answered(said.error ? [said.error, said.hint].filter(Boolean).join(": ") : said, true);
  } catch (error) {
    answered("not connected: nothing was told", true);
  }
  for (const button of document.querySelectorAll("#control button")) button.disabled = false;
}

function answered(words, wrong) {
  setText(at("answer"), words);
  setClass(at("answer"), wrong ? "bad" : "");
}

function ask(question, yes, ...words) {
  asking = words;
  setText(at("asked"), question);
  setText(at("yes"), yes);
  at("question").showModal();
  at("no").focus();
}

function offerOrders(run) {
  at("control").hidden = !acts || !run.hears;
  at("fleet").classList.toggle("acts", acts && run.hears);
  at("pause").hidden = run.status === "paused";
  at("resume").hidden = run.status !== "paused";
}

at("pause").addEventListener("click", () => tell("pause"));
at("resume").addEventListener("click", () => tell("resume"));
at("stop").addEventListener("click", () => ask("End the job? Its members are told that it is over, and keep the model as it is. It cannot go on after that.", "end the job", "stop"));
at("yes").addEventListener("click", () => { at("question").close(); tell(...asking); });
at("no").addEventListener("click", () => at("question").close());

// --- the fleet: all members in columns, only the visible rows in the page ---

const ROW = 28;
const MORE_ROWS = 3;
const HEADINGS = [
  ["name", "member", null],
  ["standing", "state", null],
  ["step", "step", String],
  ["pace_s", "pace", duration],
  ["wait_share", "waiting", share],
  ["round_trip_s", "round trip", duration],
  ["sent_bytes", "up", size],
  ["received_bytes", "down", size],
  ["celsius", "heat", value => known(value) ? value.toFixed(0) + " C" : "-"],
  ["peak_bytes", "memory", size],
  ["disk_free_bytes", "disk free", size],
  ["swap_bytes", "swap", size],
  ["mhz", "MHz", plain],
  ["wifi_dbm", "signal", value => known(value) ? plain(value) + " dBm" : "-"],
  ["clock_s", "clock", value => known(value) ? value.toFixed(1) + " s" : "-"],
  ["loss", "loss", value => known(value) ? value.toFixed(3) : "-"],
];
const OVER = new Set(["gone", "failed", "lost", "left", "finished", "removed"]);
const BAD = new Set(["gone", "failed", "lost"]);

// Height and scroll position are kept: to ask for them while drawing costs a layout of its own.
const fleet = { columns: null, order: [], sort: "name", down: false, rows: [], height: 0, top: 0 };
const natural = new Intl.Collator("en", { numeric: true });

// Comparing names costs more than all else, and they seldom change: their ranks are kept.
const ranks = { name: [], standing: [], of: { name: [], standing: [] } };

function ranksOf(key, values) {
  const before = ranks.of[key];
  if (values.length !== before.length || values.some((value, place) => value !== before[place])) {
    const sorted = [...new Set(values)].sort(natural.compare);
    const rank = new Map(sorted.map((value, place) => [value, place]));
    ranks[key] = values.map(value => rank.get(value));
    ranks.of[key] = values;
  }
  return ranks[key];
}

function makeHead() {
  for (const [key, heading] of HEADINGS) {
    const cell = document.createElement("th"), button = document.createElement("button");
    cell.scope = "col";
    button.type = "button";
    button.textContent = heading;
    button.addEventListener("click", () => {
      fleet.down = fleet.sort === key ? !fleet.down : key !== "name" && key !== "standing";
      fleet.sort = key;
      showSort();
      arrange();
      drawFleet();
    });
    cell.append(button);
    cell.dataset.key = key;
    at("fleet-head").append(cell);
  }
  if (acts) at("fleet-head").append(actCell());
  showSort();
}

function showSort() {
  for (const cell of at("fleet-head").querySelectorAll("[data-key]")) {
    const mine = cell.dataset.key === fleet.sort;
    cell.setAttribute("aria-sort", mine ? (fleet.down ? "descending" : "ascending") : "none");
    const heading = HEADINGS.find(each => each[0] === cell.dataset.key)[1];
    setText(cell.firstChild, mine ? heading + (fleet.down ? " ▼" : " ▲") : heading);
  }
}

function arrange() {
  const columns = fleet.columns;
  if (!columns) return;
  const words = at("find").value.trim().toLowerCase(), state = at("state").value;
  const called = place => columns.name[place] + " " + columns.enrolled[place];
  const text = fleet.sort === "name" || fleet.sort === "standing", sign = fleet.down ? -1 : 1;
  const keys = text ? ranksOf(fleet.sort, columns[fleet.sort]) : columns[fleet.sort];
  const order = [];
  for (let place = 0; place < columns.name.length; place++) {
    if (words && !called(place).toLowerCase().includes(words)) continue;
    if (state && columns.standing[place] !== state) continue;
    order.push(place);
  }
  order.sort((one, two) => {
    const a = keys[one], b = keys[two];
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : one - two; // unknown ones last
    return sign * (a - b) || one - two;
  });
  fleet.order = order;
  const all = columns.name.length;
  setText(at("shown"), order.length === all ? `${all} members` : `${order.length} of ${all} members`);
}

// Of an element with nothing but text in it. The text changes in place: a new one costs more.
function setText(element, text) {
  const node = element.firstChild;
  if (!node) element.textContent = text;
  else if (node.data !== text) node.data = text;
}

function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

function actCell() {
  const cell = document.createElement("td");
  cell.className = "act";
  return cell;
}

function makeRow() {
  const row = document.createElement("tr");
  for (let place = 0; place < HEADINGS.length; place++) row.append(document.createElement("td"));
  if (acts) {
    const cell = actCell(), button = document.createElement("button");
    button.type = "button";
    button.textContent = "remove …";
    button.addEventListener("click", () => ask(`Remove ${row.member}? It is told so and ends. It may join again.`, `remove ${row.member}`, "remove", row.member));
    cell.append(button);
    row.append(cell);
  }
  return row;
}

function drawFleet() {
  const columns = fleet.columns, order = fleet.order;
  if (!columns) return;
  const fit = Math.ceil(fleet.height / ROW) + 2 * MORE_ROWS;
  const first = Math.max(0, Math.min(Math.floor(fleet.top / ROW) - MORE_ROWS, order.length - fit));
  const count = Math.min(fit, order.length - first);
  const body = at("fleet-rows");
  while (fleet.rows.length < count) { const row = makeRow(); fleet.rows.push(row); body.append(row); }
  while (fleet.rows.length > count) fleet.rows.pop().remove();
  at("above").firstChild.style.setProperty("height", first * ROW + "px", "important");
  at("below").firstChild.style.setProperty("height", (order.length - first - count) * ROW + "px", "important");
  for (let place = 0; place < count; place++) {
    const member = order[first + place], cells = fleet.rows[place].children;
    fleet.rows[place].member = columns.name[member];
    if (acts) setHidden(cells[HEADINGS.length].firstChild, !sections.run.hears || OVER.has(columns.standing[member]));
    for (let column = 0; column < HEADINGS.length; column++) {
      const [key, , say] = HEADINGS[column], value = columns[key][member], cell = cells[column];
      if (key === "name") {
        const machine = columns.enrolled[member];
        setText(cell, machine && machine !== value ? value + " " + machine : value);
        if (cell.title !== cell.textContent) cell.title = cell.textContent;
      } else if (key === "standing") {
        setText(cell, value || "-");
        setClass(cell, BAD.has(value) ? "bad" : value === "late" ? "late" : "");
      } else {
        setText(cell, say(value));
        if (key === "celsius") {
          const weak = columns.under_voltage[member], slow = columns.throttled[member];
          setText(cell, say(value) + (weak ? " under-voltage" : slow ? " !" : ""));
          setClass(cell, weak || slow ? "bad" : "");
        } else if (key === "wait_share") setClass(cell, value > 0.5 ? "bad" : "");
      }
    }
  }
}

function offerStates() {
  const select = at("state"), there = new Set([...select.options].map(each => each.value));
  for (const state of new Set(fleet.columns.standing)) {
    if (!state || there.has(state)) continue;
    const option = document.createElement("option");
    option.value = option.textContent = state;
    select.append(option);
  }
}

// --- curves ---

const charts = {};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function chart(id, columns, line, say, target) {
  const box = at(id), [x, y] = columns;
  box.parentElement.hidden = !x.length;
  if (!x.length) return;
  const data = [x, y];
  if (known(target)) data.push(x.map(() => target));
  if (charts[id] && charts[id].series.length === data.length) {
    charts[id].setData(data);
    return;
  }
  if (charts[id]) charts[id].destroy();
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const series = [
    { label: "time", value: (u, value) => duration(value) },
    { label: "value", stroke: colour(line), width: 2, points: { show: false }, value: (u, value) => known(value) ? say(value) : "-" },
  ];
  if (data.length > 2) series.push({ label: "target", stroke: colour("--soft"), dash: [4, 3], width: 1, points: { show: false }, value: (u, value) => known(value) ? say(value) : "-" });
  charts[id] = new uPlot({
    width: box.clientWidth || 300,
    height: 190,
    scales: { x: { time: false } },
    axes: [
      { ...axis, values: (u, ticks) => ticks.map(each => each === 0 ? "0" : duration(each)) },
      { ...axis, size: 58, values: (u, ticks) => ticks.map(say) },
    ],
    series,
  }, data, box);
}

function drawCurves(curves) {
  const percent = value => plain(value * 100) + " %";
  setText(at("figure-title"), curves.metric);
  chart("figure", curves.figure, "--flight", curves.percent ? percent : plain, curves.target);
  chart("loss", curves.loss, "--s0", plain);
  chart("waiting", curves.waiting, "--wait", share);
}

function forgetCharts() {
  for (const id of Object.keys(charts)) { charts[id].destroy(); delete charts[id]; }
}

new ResizeObserver(() => {
  for (const id of Object.keys(charts)) {
    const width = at(id).clientWidth;
    if (width && Math.abs(charts[id].width - width) > 1) charts[id].setSize({ width, height: 190 });
  }
}).observe(document.documentElement);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetCharts();
  if (sections.curves) drawCurves(sections.curves);
});

// --- the run ---

let sections = {};
let stream = null;
const fresh = new Set();
let drawing = 0;

function drawLines(list, lines) {
  list.replaceChildren(...[...lines].reverse().map(line => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
}

function drawRun(run) {
  setText(at("name"), run.name);
  document.title = `${run.name}, ${run.status}`;
  const steps = run.steps ? ` of ${run.steps}` : "";
  const about = [run.task, run.strategy, `${run.members} members`, `step ${run.step.toFixed(0)}${steps}`];
  about.push(run.status === "quiet" ? "nothing new for a minute: it may have been killed" : run.status);
  setText(at("about"), about.filter(Boolean).join(", "));
  at("done").hidden = !run.steps;
  at("done").value = run.done;
  const figures = Object.entries(run.said).filter(([, said]) => said !== "-");
  const list = at("figures");
  while (list.children.length < figures.length) {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    list.append(pair);
  }
  while (list.children.length > figures.length) list.lastChild.remove();
  figures.forEach(([name, said], place) => {
    setText(list.children[place].firstChild, name);
    setText(list.children[place].lastChild, said);
  });
  const remarks = [];
  if (run.reducers) remarks.push(run.reducers);
  if (run.final_sync) remarks.push("final sync");
  if (run.timing_ok === false) remarks.push("the emulated network was late: these times are not to be trusted");
  if (run.untold) remarks.push("members do not tell the hub how they are doing: hub.status_s = 0");
  setText(at("remarks"), remarks.join("; "));
  offerOrders(run);
}

const DRAWN = {
  run: drawRun,
  fleet: columns => { fleet.columns = columns; offerStates(); arrange(); drawFleet(); },
  curves: drawCurves,
  news: lines => drawLines(at("news"), lines),
  refusals: ({ count, lines }) => {
    setText(at("refused"), count ? `${count} so far` : "None: everybody who asked was let in.");
    drawLines(at("refusals"), lines);
  },
  timeline: drawn => {
    // Parsed in a document of its own, where nothing is loaded or run.
    const parsed = new DOMParser().parseFromString(drawn, "text/html");
    at("timeline").replaceChildren(...parsed.body.childNodes);
    if (!drawn) at("timeline").textContent = "No round yet.";
  },
  trouble: words => { at("trouble").hidden = false; setText(at("trouble"), words); },
};

// Figures and the fleet first; what is drawn more slowly a frame later.
function draw() {
  const first = ["run", "fleet"].filter(name => fresh.has(name));
  for (const name of first.length ? first : [...fresh]) {
    fresh.delete(name);
    DRAWN[name](sections[name]);
  }
  drawing = fresh.size ? requestAnimationFrame(draw) : 0;
}

function say(words, lost) {
  setText(at("link"), words);
  setClass(at("link"), lost ? "lost" : "");
}

function addressOf(what) {
  return what + given().get("run").split("/").map(encodeURIComponent).join("/");
}

function follow() {
  stop();
  answered("", false);
  sections = {};
  fleet.columns = null;
  at("trouble").hidden = true;
  at("run").hidden = true; // until there is something of this run
  at("list").hidden = true;
  stream = new EventSource(addressOf("stream/"));
  stream.addEventListener("message", message => {
    const found = JSON.parse(message.data);
    setHidden(at("run"), false);
    for (const name of Object.keys(found)) {
      sections[name] = found[name];
      if (Object.hasOwn(DRAWN, name)) fresh.add(name);
    }
    if (!drawing) drawing = requestAnimationFrame(draw);
    say(sections.run && sections.run.behind ? "reading what is there" : "live", false);
  });
  stream.addEventListener("error", () => {
    const over = stream && stream.readyState === EventSource.CLOSED;
    say(over ? "not let in, or no such run: open the address that was printed" : "not connected: trying again", true);
  });
}

function stop() {
  if (stream) stream.close();
  stream = null;
  if (drawing) cancelAnimationFrame(drawing);
  drawing = 0;
  fresh.clear();
  forgetCharts();
  fleet.rows.splice(0).forEach(row => row.remove());
}

// --- the list ---

const LISTED = [
  ["status", run => run.status === "no summary" ? "under way, or killed" : run.why ? run.status + ": " + run.why : run.status],
  ["task", run => run.task],
  ["strategy", run => run.strategy],
  ["members", run => known(run.members) ? String(run.members) : "-"],
  ["network", run => run.network],
  ["kind", run => run.kind],
  ["final", run => run.said.final],
  ["to target", run => run.said["to target"]],
  ["took", run => run.said.took],
  ["wall clock", run => run.said["wall clock"]],
  ["began", run => run.began],
];
let listing = 0;

async function list() {
  clearTimeout(listing);
  if (stream) return;
  try {
    const answer = await fetch("runs");
    if (!answer.ok) { say(await answer.text(), true); return; }
    const { runs } = await answer.json();
    drawList(runs);
    say("", false);
  } catch (error) {
    say("not connected: trying again", true);
  }
  listing = setTimeout(list, 5000);
}

function drawList(runs) {
  at("list-none").hidden = runs.length > 0;
  at("list-rows").replaceChildren(...runs.map(run => {
    const row = document.createElement("tr"), name = document.createElement("td"), link = document.createElement("a");
    link.href = "#" + new URLSearchParams({ run: run.id });
    link.textContent = run.id;
    name.append(link);
    row.append(name);
    for (const [heading, of] of LISTED) {
      const cell = document.createElement("td");
      cell.textContent = of(run);
      if (heading === "status") cell.className = run.status === "finished" ? "good" : run.status === "no summary" ? "" : "bad";
      row.append(cell);
    }
    return row;
  }));
}

// --- coming in, and going about ---

function given() {
  return new URLSearchParams(location.hash.slice(1));
}

function route() {
  if (given().get("run")) { follow(); return; }
  stop();
  document.title = "edgetrain";
  at("run").hidden = true;
  at("list").hidden = false;
  list();
}

async function enter() {
  const words = given(), token = words.get("token");
  if (token) {
    words.delete("token");
    history.replaceState(null, "", words.toString() ? "#" + words : location.pathname);
    const answer = await fetch("enter", { method: "POST", headers: { "X-Edgetrain": "1", Authorization: "Bearer " + token } });
    if (!answer.ok) { say(await answer.text(), true); return; }
  }
  route();
}

for (const heading of ["run", ...LISTED.map(each => each[0])]) {
  const cell = document.createElement("th");
  cell.scope = "col";
  cell.textContent = heading;
  at("list-head").append(cell);
}
makeHead();
at("fleet").addEventListener("scroll", () => {
  fleet.top = at("fleet").scrollTop;
  requestAnimationFrame(drawFleet);
}, { passive: true });
new ResizeObserver(() => {
  fleet.height = at("fleet").clientHeight;
  drawFleet();
}).observe(at("fleet"));
at("find").addEventListener("input", () => { arrange(); drawFleet(); });
at("state").addEventListener("change", () => { arrange(); drawFleet(); });
addEventListener("hashchange", () => given().get("token") ? enter() : route());
enter();
