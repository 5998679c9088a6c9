// Requests to the server that sent this page, with the API key of this tab.

const KEY = "ingot-api-key";
const dialog = document.getElementById("key-dialog");
const keyInput = document.getElementById("key");
const changeKey = document.getElementById("change-key");
let asking = null;
let declined = false;

changeKey.hidden = !hasKey();
changeKey.addEventListener("click", askForKey);

/** An error of the server, with its message and hint. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Return the response of a path; ask for the API key and try again if the server refuses it. */
export async function request(path, body, signal) {
  for (;;) {
    const response = await fetch(path, options(body, signal));
    if (response.ok) return response;
    const error = await errorOf(response);
    const polling = body === undefined;
    if (error.status !== 401 || (polling && declined) || !(await askForKey())) throw error;
  }
}

function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Ask for the key; calls made meanwhile wait for the same answer. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    document.getElementById("key-error").textContent = hasKey() ? "The key was refused." : "";
    keyInput.value = dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue && keyInput.value.trim();
      if (key) sessionStorage.setItem(KEY, key);
      declined = key === "";
      changeKey.hidden = false;
      asking = null;
      resolve(!declined);
    }, { once: true });
  });
  return asking;
}

/** Yield the events of a stream as objects; throw the error that one of them reports. */
export async function* events(response) {
  let buffer = "";
  for await (const part of decoded(response.body.getReader())) {
    buffer += part;
    for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) {
      const data = buffer.slice(0, end).replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, event.error.message);
      yield event;
    }
  }
}

async function* decoded(reader) {
  const decoder = new TextDecoder();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield decoder.decode(value, { stream: true });
  }
}

function options(body, signal) {
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (body === undefined) return { headers, signal };
  headers["Content-Type"] = "application/json";
  return { method: "POST", headers, body: JSON.stringify(body), signal };
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an answer of this server: the status has to do.
  }
  return new ApiError(response.status, message);
}
