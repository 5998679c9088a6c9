// One reply of the model: reasoning, text, tool calls and how fast it was generated.

import { TokenText } from "./tokens.js";

/** Return an element with a class and children. */
export function make(name, className = "", ...children) {
  const element = document.createElement(name);
  element.className = className;
  element.append(...children);
  return element;
}

/** A reply that is being streamed into an element. */
export class Reply {
  constructor(element, { onResults, onRetry }) {
    this.element = element;
    this.onResults = onResults;
    this.onRetry = onRetry;
    this.calls = [];
    this.tokens = null; // of the last event; null without log-probabilities
    this.early = []; // tokens before the first text
    this.usage = null;
    this.reason = null;
    this.started = performance.now();
    this.first = this.last = null;
    element.classList.add("busy");
  }

  /** Show the next event of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.reason = choice.finish_reason ?? this.reason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    this.tokens = choice.logprobs?.content ?? (this.tokens ? [] : null);
    const tokens = this.tokens;
    if (calls) for (const call of calls) this.#addCall(call);
    else if (reasoning) this.#addText(this.#reasoning, reasoning, tokens);
    else if (content) this.#addText(this.#content, content, tokens);
    else if (tokens) this.#addText(this.current, "", tokens);
  }

  /** Show the statistics and ask for the results of calls; `note` replaces the finish reason. */
  finish(note) {
    this.element.classList.remove("busy");
    for (const text of [this.reasoningText, this.contentText]) text?.finish();
    if (note) for (const call of this.calls.splice(0)) call.element.remove(); // cut off
    if (this.calls.length) this.#askForResults();
    const retry = make("button", "quiet", "Retry");
    retry.type = "button";
    retry.onclick = this.onRetry;
    this.element.append(make("p", "figures", this.#figures(note), retry));
  }

  /** Accept no more results of calls. */
  close() {
    this.send.remove();
    for (const { input } of this.calls) input.readOnly = true;
  }

  /** Return the message for the next request; none if there is nothing in it. */
  messages() {
    const message = { role: "assistant", content: this.contentText?.text ?? "" };
    if (!message.content && !this.calls.length) return [];
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, text }) => (
        { id, type: "function", function: { name, arguments: text } }));
    }
    return [message];
  }

  #addText(target, text, tokens) {
    if (target && tokens) tokens = [...this.early.splice(0), ...tokens];
    if (target) target.add(text, tokens);
    else this.early.push(...tokens);
    this.current = target;
  }

  get #content() {
    if (!this.contentText) {
      const element = make("div", "text");
      this.contentText = new TokenText(element);
      this.element.append(element);
    }
    return this.contentText;
  }

  get #reasoning() {
    if (!this.reasoningText) {
      const element = make("div", "text");
      this.reasoningText = new TokenText(element);
      this.element.append(
        make("details", "reasoning", make("summary", "", "Reasoning"), element));
    }
    return this.reasoningText;
  }

  #addCall({ index, id, function: { name, arguments: part } }) {
    let call = this.calls[index];
    if (!call) {
      call = this.calls[index] = { id, name, text: "", shown: make("pre") };
      call.element = make("div", "call", make("h3", "", name), call.shown);
      this.element.append(call.element);
    }
    call.text += part;
    call.shown.textContent = call.text;
  }

  #askForResults() {
    for (const call of this.calls) {
      call.shown.textContent = indented(call.text);
      call.input = make("textarea", "code");
      call.input.rows = 2;
      call.element.append(make("label", "", "Result", call.input));
    }
    this.send = make("button", "", "Send results");
    this.send.type = "button";
    this.send.onclick = () => this.onResults(this.calls.map(({ id, name, input }) => (
      { role: "tool", tool_call_id: id, name, content: input.value })));
    this.element.append(this.send);
    this.calls[0].input.focus();
  }

  #figures(note) {
    const parts = [];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
      const cached = this.usage.prompt_tokens_details.cached_tokens;
      parts.push(`${prompt} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
      parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
      const seconds = (this.last - this.first) / 1000;
      if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (this.first !== null) {
      parts.push(`first token after ${Math.round(this.first - this.started)} ms`);
    }
    parts.push(note ?? this.reason ?? "incomplete");
    return parts.join(" · ");
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off by the limit of tokens
  }
}
