"use strict";
// A chat against this server's own /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const conversation = []; // {role, content}
let model = null;
let running = null; // the AbortController of the answer in progress

$("key").value = sessionStorage.getItem("key") || "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  loadModel();
});

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function loadModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.ok) {
    model = (await response.json()).data[0].id;
    $("model").textContent = model;
    $("status").textContent = "";
  } else {
    $("status").textContent = response.status === 401 ? "This server needs an API key: see Settings." : await reason(response);
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// Shows text, with fenced code in boxes. Text of the model is never interpreted as HTML.
function show(element, text) {
  const parts = text.split(/^```.*$/m).map((part, index) => {
    const node = document.createElement(index % 2 ? "pre" : "span");
    node.textContent = index % 2 ? part.replace(/^\n|\n$/g, "") : part;
    return node;
  });
  element.replaceChildren(...parts);
}

function addMessage(role) {
  $("empty")?.remove();
  const message = document.createElement("div");
  const who = document.createElement("div");
  const text = document.createElement("div");
  message.className = `message ${role}`;
  who.className = "who";
  text.className = "text";
  who.textContent = role === "user" ? "You" : "Model";
  message.append(who, text);
  $("messages").append(message);
  return text;
}

function setBusy(busy) {
  $("send").classList.toggle("hidden", busy);
  $("stop").classList.toggle("hidden", !busy);
  $("again").disabled = busy || !conversation.some((message) => message.role === "user");
  $("clear").disabled = busy || conversation.length === 0;
}

// Yields the JSON of each server-sent event until the stream ends.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function holders(id) {
  const response = await fetch("placement", { headers: headers() });
  if (!response.ok) return "";
  const workers = Object.entries((await response.json()).workers);
  const found = workers.filter(([, worker]) => Object.keys(worker.largest_requests).some((name) => name.startsWith(id)));
  return found.length ? `, KV on ${found.map(([name]) => name).join(", ")}` : "";
}

async function answer() {
  const system = $("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("max-tokens").value) body.max_completion_tokens = Number($("max-tokens").value);
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  const text = addMessage("assistant");
  const began = performance.now();
  let content = "", tokens = 0, first = 0, where = "", looked = began;
  running = new AbortController();
  setBusy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error(await reason(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices?.[0]?.delta?.content || "";
      if (piece && !first) first = performance.now();
      content += piece;
      if (event.usage) tokens = event.usage.completion_tokens;
      const atEnd = $("messages").scrollTop + $("messages").clientHeight >= $("messages").scrollHeight - 40;
      show(text, content);
      if (atEnd) $("messages").scrollTop = $("messages").scrollHeight;
      if (performance.now() - looked > 500) {
        looked = performance.now();
        holders(event.id).then((found) => (where = found || where));
      }
    }
    const ended = performance.now();
    const rate = tokens > 1 ? `, ${((tokens - 1) / ((ended - first) / 1000)).toFixed(1)} tokens/s` : "";
    $("status").textContent = `${tokens} tokens, first after ${((first - began) / 1000).toFixed(2)} s${rate}${where}`;
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    running = null;
    if (content) conversation.push({ role: "assistant", content });
    else text.parentElement.remove();
    setBusy(false);
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = $("text").value.trim();
  if (!content || running) return;
  conversation.push({ role: "user", content });
  show(addMessage("user"), content);
  $("text").value = "";
  $("messages").scrollTop = $("messages").scrollHeight;
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => {
  if (conversation.at(-1)?.role === "assistant") {
    conversation.pop();
    $("messages").lastElementChild.remove();
  }
  answer();
});
$("clear").addEventListener("click", () => {
  conversation.length = 0;
  $("messages").replaceChildren();
  $("status").textContent = "";
  setBusy(false);
  $("text").focus();
});
loadModel();
