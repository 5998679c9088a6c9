// The list of models with their status, and live statistics of the selected one.

import { request } from "./api.js";

const PERIOD_MS = 1000;
const select = document.getElementById("model");
const status = document.getElementById("status");
let earlier = null;

/** Keep the list and the statistics up to date while the page is visible. */
export async function poll() {
  for (;;) {
    try {
      if (!document.hidden) await update();
    } catch (error) {
      show(null, error.status ? error.message : "the server does not respond");
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

async function update() {
  const models = (await (await request("/v1/models")).json()).data;
  const stats = (await (await request("/v1/stats")).json()).data;
  list(models);
  const model = models.find(({ id }) => id === select.value);
  const name = model?.parent ?? model?.id;
  const one = stats.find((entry) => entry.model === name);
  show(one, model?.status ?? one?.status, model?.max_model_len);
}

function list(models) {
  const options = models.map((model) => new Option(label(model), model.id));
  const texts = (some) => [...some].map(({ text }) => text).join("\n");
  if (texts(select.options) === texts(options)) return;
  const selected = select.value;
  select.replaceChildren(...options);
  if (models.some(({ id }) => id === selected)) select.value = selected;
}

function label({ id, parent, status: state }) {
  if (parent) return `${id} (adapter of ${parent})`;
  return state && state !== "ready" ? `${id} (${state})` : id;
}

function show(stats, state, context) {
  const length = context ? `, ${context.toLocaleString("en")} tokens of context` : "";
  const text = `${state ?? "unknown"}${state === "ready" ? length : ""}`;
  if (status.textContent !== text) status.textContent = text; // announced when it changes
  status.className = stats === null ? "unavailable" : state === "ready" ? "ready" : "";
  const now = performance.now();
  const values = {
    running: stats?.num_requests_running,
    waiting: stats?.num_requests_waiting,
    throughput: stats && throughput(stats, now),
    "kv-cache": percent(stats?.kv_cache_usage),
    "prefix-hits": percent(stats?.prefix_cache_hit_rate),
  };
  const unknown = state === "ready" ? "0" : "–"; // no statistics before the first step
  for (const [id, value] of Object.entries(values)) {
    document.getElementById(id).textContent = value ?? unknown;
  }
  earlier = stats && { ...stats, now };
}

function throughput(stats, now) {
  const known = earlier?.model === stats.model && stats.generated_tokens >= earlier.generated_tokens;
  if (!known) return null;
  const tokens = stats.generated_tokens - earlier.generated_tokens;
  return Math.round((1000 * tokens) / (now - earlier.now));
}

function percent(value) {
  return value === undefined || value === null ? null : `${Math.round(100 * value)} %`;
}
