"use strict";
// Shows what the server sends once a second. Rates and latencies are differences between two states.

const SECONDS = 300; // shown
const SILENT_MS = 10000; // without an event until the connection counts as lost
const WINDOW = 10; // seconds that a latency's quantile looks back
const $ = (id) => document.getElementById(id);
const history = []; // states, oldest first
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const count = (value) => Math.round(value).toLocaleString("en");

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

// The quantile of what two cumulative histograms differ by, in seconds, interpolated within its bucket; null if nothing.
function quantile(now, then, share) {
  const grown = now.map(([bound, total], index) => [bound, total - (then[index]?.[1] ?? 0)]);
  const all = grown.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let low = 0, below = 0;
  for (const [bound, total] of grown) {
    if (total >= share * all) return bound === null ? low : low + ((bound - low) * (share * all - below)) / (total - below || 1);
    low = bound;
    below = total;
  }
  return low;
}

const charts = {};
function makeCharts() {
  const make = (id, series) => {
    charts[id]?.destroy();
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    charts[id] = new uPlot({
      width: $(id).clientWidth || 300, height: 160,
      series: [{}, ...series.map(([label, color]) => ({ label, stroke: css(color), width: 1.5, spanGaps: true }))],
      axes: [axis, { ...axis, size: 56 }],
      scales: { y: { range: (_, low, high) => [0, Math.max(high, 1e-3) * 1.1] } },
      cursor: { drag: { x: false, y: false } },
      legend: { live: false },
    }, [[], ...series.map(() => [])], $(id));
  };
  make("tokens", [["generated", "--compute"], ["prompt", "--memory"]]);
  make("requests", [["running", "--compute"], ["waiting", "--warn"]]);
  make("first", [["median", "--compute"], ["99 %", "--warn"]]);
  make("between", [["median", "--compute"], ["99 %", "--warn"]]);
}

function draw() {
  const times = history.map((state) => state.time);
  const rate = (name) => history.map((state, index) => {
    if (!index) return null;
    const before = history[index - 1];
    return Math.max(0, (state.tokens[name] - before.tokens[name]) / (state.time - before.time));
  });
  const latency = (name, share, scale) => history.map((state, index) => {
    const found = index ? quantile(state.latency[name], history[Math.max(0, index - WINDOW)].latency[name], share) : null;
    return found === null ? null : found * scale;
  });
  charts.tokens.setData([times, rate("generated"), rate("prompt")]);
  charts.requests.setData([times, history.map((state) => state.requests.running), history.map((state) => state.requests.waiting)]);
  charts.first.setData([times, latency("time_to_first_token", 0.5, 1), latency("time_to_first_token", 0.99, 1)]);
  charts.between.setData([times, latency("time_between_tokens", 0.5, 1000), latency("time_between_tokens", 0.99, 1000)]);
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const field = document.createElement("td");
    if (cell instanceof Node) field.append(cell);
    else field.textContent = cell;
    if (typeof cell === "number" || /^[\d.,]+( \w+)?$/.test(cell)) field.className = "number";
    line.append(field);
  }
  return line;
}

function bar(worker) {
  const outer = document.createElement("div");
  outer.className = "bar";
  outer.title = `${count(worker.used)} in use, ${count(worker.cached)} cached of ${count(worker.capacity)} slots`;
  for (const kind of ["used", "cached"]) {
    const part = document.createElement("div");
    part.className = kind;
    part.style.width = `${(100 * worker[kind]) / Math.max(worker.capacity, 1)}%`;
    outer.append(part);
  }
  return outer;
}

function show(state) {
  $("model").textContent = state.model;
  const stateOf = (name) => {
    const text = document.createElement("span");
    const silent = state.silent_s[name];
    text.textContent = silent ? `no answer for ${silent} s` : state.workers[name] ?? "serving";
    if (silent) text.className = "warn";
    return text;
  };
  const limit = [document.createElement("span")];
  limit[0].textContent = `${state.limit.what} `;
  if (state.limit.remedy) {
    limit.push(document.createElement("code"));
    limit[1].textContent = state.limit.remedy;
  }
  $("limit").replaceChildren(...limit);
  $("limit").classList.toggle("warn", state.dead !== null || Object.keys(state.silent_s).length > 0 || state.requests.waiting > 0);

  const before = history.at(-2);
  const speed = before ? (state.tokens.generated - before.tokens.generated) / (state.time - before.time) : 0;
  const cache = state.placement.prefix_cache;
  const figures = [
    [count(Math.max(0, speed)), "tokens/s generated"],
    [count(state.requests.running), "requests running"],
    [count(state.requests.waiting), "requests waiting"],
    [cache.queried ? `${Math.round((100 * cache.hit) / cache.queried)} %` : "–", "of prompt tokens cached"],
    [count(state.counts.preempted), "preemptions"],
    [count(state.counts.recoveries), "recoveries from lost workers"],
  ];
  $("figures").replaceChildren(...figures.map(([value, name]) => {
    const figure = document.createElement("div"), number = document.createElement("b"), label = document.createElement("span");
    figure.className = "figure";
    number.textContent = value;
    label.textContent = name;
    figure.append(number, label);
    return figure;
  }));

  const memory = Object.entries(state.placement.workers);
  $("memory").replaceChildren(...memory.map(([name, worker]) => {
    const largest = document.createElement("span");
    for (const [request, tokens] of Object.entries(worker.largest_requests).slice(0, 3)) largest.append(button(request), ` ${count(tokens)} `);
    return row(name, stateOf(name), bar(worker), count(worker.used), count(worker.cached), count(worker.capacity), bytes(worker.moved_bytes), largest);
  }));
  const moves = state.placement.moves;
  const moving = moves.in_progress.map((move) => `${count(move.tokens)} tokens from ${move.source} to ${move.target}`);
  $("moves").textContent =
    `Moves: ${count(moves.completed)} completed, ${count(moves.refused)} refused, ${count(moves.cancelled)} cancelled` +
    (moving.length ? `; in progress: ${moving.join(", ")}` : "") +
    `. The fullest worker holds ${state.placement.imbalance} times the mean.`;
  const compute = Object.keys(state.workers).filter((name) => !(name in state.placement.workers));
  const roles = { prefill: "prompts", decode: "decoding", both: "prompts and decoding" };
  $("compute").replaceChildren(...compute.map((name) => row(name, stateOf(name), roles[state.places[name]?.role] ?? "")));
  $("links").replaceChildren(...state.links.map((link) => row(link.transport, count(link.pairs), link.reason)));
}

// Each worker's row of each lane: a bar with what it did in a window of some hundred milliseconds.
function showLanes(lanes) {
  const colors = { slice: css("--compute"), attention: css("--memory"), "chunk attention": css("--memory") };
  const rows = Object.entries(lanes.workers).flatMap(([worker, spans]) =>
    [...new Set(spans.map(([, lane]) => lane))].map((lane) => ({ worker, lane, spans: spans.filter((span) => span[1] === lane) })));
  rows.sort((one, other) => one.lane - other.lane || one.worker.localeCompare(other.worker));
  $("window").textContent = rows.length ? `A window of ${(lanes.length_us / 1000).toFixed(0)} ms, taken once a second.` : "Nothing runs.";
  const share = (spans, name) => {
    const busy = spans.filter(([stage]) => stage.endsWith(name)).reduce((sum, span) => sum + span[3], 0);
    return `${Math.round((100 * busy) / Math.max(lanes.length_us, 1))} %`;
  };
  const canvases = rows.map(() => document.createElement("canvas"));
  $("lanes").replaceChildren(...rows.map(({ worker, lane, spans }, index) => {
    const slices = share(spans, "slice"), attention = share(spans, "attention");
    canvases[index].className = "spans";
    canvases[index].setAttribute("role", "img");
    canvases[index].setAttribute("aria-label", `${worker}: slices ${slices}, attention ${attention} of the time`);
    return row(lane < 0 ? "all" : String(lane), worker, canvases[index], slices, attention);
  }));
  rows.forEach(({ spans }, index) => {
    const canvas = canvases[index], ratio = devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const scale = canvas.width / Math.max(lanes.length_us, 1);
    for (const [stage, , begin, length] of spans) {
      pen.fillStyle = colors[stage] ?? css("--cached");
      pen.fillRect(begin * scale, 0, Math.max(length * scale, 0.5), canvas.height);
    }
  });
}

// One request's life: how long it waited, its prompt ran and it decoded, as a bar, and each event of it.
const LISTED = 12;
let chosen = null; // id of the request shown
let shown = null; // what is known of it
let lives = [];

const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);

function phases(life, now) {
  const at = (what) => life.events.find((event) => event[1] === what)?.[0];
  const end = at("ended") ?? Math.max(now - life.queued, 0);
  const admitted = at("admitted") ?? end, first = at("first token") ?? end;
  return { queued: admitted, prompt: Math.max(first - admitted, 0), decoding: Math.max(end - first, 0), end, running: at("admitted") !== undefined };
}

function choose(id) {
  chosen = chosen === id ? null : id;
  shown = null;
  showLives(history.at(-1).time);
}

function button(id) {
  const made = document.createElement("button");
  made.className = "link";
  made.textContent = id;
  made.setAttribute("aria-expanded", String(id === chosen));
  made.setAttribute("aria-controls", "life");
  made.dataset.request = id;
  made.onclick = () => choose(id);
  return made;
}

function showLives(now) {
  const focused = document.activeElement?.dataset?.request;
  $("lives").replaceChildren(...lives.slice(0, LISTED).map((life) => {
    const { queued, prompt, decoding, running } = phases(life, now);
    const state = life.ended || (running ? "running" : "waiting");
    return row(button(life.request), state, count(life.prompt_tokens), count(life.generated), seconds(queued), seconds(prompt), seconds(decoding));
  }));
  if (!lives.length) $("lives").replaceChildren(row("No request yet."));
  const life = shown = chosen === null ? null : lives.find((one) => one.request === chosen) ?? shown;
  $("life").hidden = !life;
  if (life) {
    const spent = phases(life, now);
    $("life-title").textContent = `Request ${life.request}`;
    $("life-bar").replaceChildren(...["queued", "prompt", "decoding"].map((phase) => {
      const part = document.createElement("div");
      part.className = phase;
      part.style.width = `${(100 * spent[phase]) / Math.max(spent.end, 1e-6)}%`;
      part.title = `${phase}: ${seconds(spent[phase])}`;
      return part;
    }));
    $("life-bar").setAttribute("aria-label", ["queued", "prompt", "decoding"].map((phase) => `${phase} ${seconds(spent[phase])}`).join(", "));
    const steps = life.generated > 1 && spent.decoding ? [["", "steps", `${count(life.generated)} tokens, ${seconds(spent.decoding / (life.generated - 1))} each after the first`]] : [];
    const listed = life.events.map(([at, what, detail]) => [seconds(at), what, detail ?? ""]);
    const last = listed.at(-1)?.[1] === "ended" ? listed.pop() : null;
    $("life-events").replaceChildren(...[...listed, ...steps, ...(last ? [last] : [])].map((cells) => row(...cells)));
  }
  if (focused) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function onView({ state, lanes, lives: told }) {
  history.push(state);
  while (history[0].time < state.time - SECONDS) history.shift();
  lives = told.sort((one, other) => other.queued - one.queued);
  show(state);
  showLanes(lanes);
  showLives(state.time);
  draw();
  $("connection").textContent = "Live";
}

// Reads server-sent events by fetch: EventSource cannot send a key.
async function watch() {
  const key = sessionStorage.getItem("key");
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENT_MS);
  try {
    const response = await fetch("dashboard/events", { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: silence.signal });
    if (response.status === 401) throw new Error("This server needs its LAMINA_METRICS_KEY: enter it as the API key on the chat page.");
    if (!response.ok) throw new Error(`The server answered ${response.status}.`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done) break;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const [, kind, data] = text.slice(0, end).match(/^event: (\w+)\ndata: (.*)$/s);
        if (kind === "view") onView(JSON.parse(data));
        else $("connection").textContent = `The engine does not answer: ${JSON.parse(data).message}`;
      }
    }
    $("connection").textContent = "The server has ended the connection; trying again.";
  } catch (error) {
    $("connection").textContent = error.message.startsWith("Th") && !silence.signal.aborted ? error.message : "No answer from the server; trying again.";
  }
  clearTimeout(timer);
  setTimeout(watch, 1000);
}

makeCharts();
addEventListener("resize", () => Object.entries(charts).forEach(([id, chart]) => chart.setSize({ width: $(id).clientWidth, height: 160 })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makeCharts(); draw(); });
watch();
