// The page at `/`: a chat with a model of this server.

import { watch } from "./alternatives.js";
import { events, request } from "./api.js";
import { Reply, make } from "./reply.js";
import { poll } from "./stats.js";

const SETTINGS = "ingot-settings";
const TOP = 5;
const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Current weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
}];
const [conversation, composer, input, send, stop, probabilities, form, toolsError] = [
  "conversation", "composer", "input", "send", "stop", "probabilities", "settings-form",
  "tools-error",
].map((id) => document.getElementById(id));
const wide = matchMedia("(min-width: 801px)");
let messages = [];
let running = null; // the AbortController of the reply that is being streamed
let following = true; // whether the end of the conversation is visible
let frame = null;

// Settings

function tools() {
  const text = form.tools.value.trim();
  if (!text) return undefined;
  const list = [JSON.parse(text)].flat();
  return list.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

/** Whether all settings are valid; shows the first that is not. */
function checkSettings() {
  toolsError.textContent = "";
  try {
    tools();
  } catch (error) {
    toolsError.textContent = `Tools: ${error.message}`;
    document.getElementById("settings").open = true;
    form.tools.focus();
    return false;
  }
  return form.reportValidity();
}

function saveSettings() {
  const values = Object.fromEntries(new FormData(form));
  sessionStorage.setItem(SETTINGS, JSON.stringify(values));
}

function restoreSettings() {
  const values = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
  for (const [name, value] of Object.entries(values)) if (form[name]) form[name].value = value;
}

/** Show the settings if there is room for them. */
function openSettings() {
  document.getElementById("settings").open = wide.matches;
}

function body() {
  const system = form.system.value.trim();
  const definitions = tools();
  const body = {
    model: document.getElementById("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (form[name].value !== "") body[name] = form[name].valueAsNumber;
  }
  if (definitions) Object.assign(body, { tools: definitions, tool_choice: form.tool_choice.value });
  if (probabilities.checked) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  return body;
}

// Conversation

function addItem(role, title) {
  const item = make("li", role, make("h2", "", title));
  conversation.append(item);
  return item;
}

function addUser(text) {
  addItem("user", "You").append(make("div", "text", text));
  messages.push({ role: "user", content: text });
}

/** Show the end in the next frame: a layout for each token would take seconds in a long reply. */
function scrollDown() {
  frame ??= requestAnimationFrame(() => {
    frame = null;
    conversation.scrollTop = conversation.scrollHeight;
  });
}

function setRunning(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  conversation.setAttribute("aria-busy", String(controller !== null));
}

/** Stream the reply to the messages. */
async function generate() {
  const asked = body();
  const item = addItem("assistant", asked.model);
  const count = messages.length;
  const controller = new AbortController();
  const reply = new Reply(item, {
    onResults: (results) => {
      if (running || !checkSettings()) return;
      reply.close();
      messages.push(...results);
      generate();
    },
    onRetry: () => retry(item, count),
  });
  setRunning(controller);
  scrollDown();
  let note;
  try {
    const response = await request("/v1/chat/completions", asked, controller.signal);
    for await (const event of events(response)) {
      reply.add(event);
      if (following) scrollDown();
    }
  } catch (error) {
    note = controller.signal.aborted ? "stopped" : "failed";
    if (note === "failed") showError(item, error);
  }
  if (messages.length !== count || !item.isConnected) return; // a new chat was started
  setRunning(null);
  reply.finish(note);
  messages.push(...reply.messages());
  scrollDown();
}

function showError(item, error) {
  const message = make("p", "error", error.message);
  message.setAttribute("role", "alert");
  item.append(message);
}

/** Generate a reply again: remove it and what follows it. */
function retry(item, count) {
  if (running || !checkSettings()) return;
  while (item.nextElementSibling) item.nextElementSibling.remove();
  item.remove();
  messages = messages.slice(0, count);
  generate();
}

function clear() {
  running?.abort();
  setRunning(null);
  messages = [];
  conversation.replaceChildren();
  input.focus();
}

// Events

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || running || !checkSettings()) return;
  input.value = "";
  addUser(text);
  generate();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
conversation.addEventListener("scroll", () => {
  const below = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight;
  following = below < 40;
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("clear").addEventListener("click", clear);
document.getElementById("example").addEventListener("click", () => {
  form.tools.value = JSON.stringify(EXAMPLE, null, 2);
  form.dispatchEvent(new Event("change"));
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", () => {
  saveSettings();
  checkSettings();
});
probabilities.addEventListener("change", () => {
  document.body.classList.toggle("show-probabilities", probabilities.checked);
});

restoreSettings();
openSettings();
wide.addEventListener("change", openSettings);
watch(conversation);
poll();
