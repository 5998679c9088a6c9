// Text of a reply as spans, one for each token whose log-probability the server reported.

const LOOKAHEAD = 32;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/**
 * Matches tokens with the text that they produced.
 *
 * They are not the same: special tokens have no text, a character may be several tokens, and the
 * server holds text back that could begin a stop string. What matches no token is plain text.
 */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.pending = "";
    this.tokens = [];
  }

  /** Append text, and tokens with their log-probabilities (null if there are none). */
  add(text, tokens) {
    this.text += text;
    if (tokens === null) {
      this.#addPlain(text);
      return;
    }
    this.pending += text;
    this.tokens.push(...tokens);
    while (this.pending && this.tokens.length && this.#match(...nextText(this.tokens)));
  }

  /** Show what is left: no more tokens follow. */
  finish() {
    this.#addPlain(this.pending);
    this.pending = "";
    if (this.element.querySelector(".token")) {
      this.element.classList.add("tokens");
      this.element.tabIndex = 0;
    }
  }

  #addPlain(text) {
    const last = this.element.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else this.element.append(text);
  }

  /** Take the first tokens, which have this text; return false if more is needed to decide. */
  #match(text, count) {
    if (count === 0) return false;
    for (const form of [text, text.trimStart()]) {
      const at = form ? this.pending.slice(0, LOOKAHEAD + form.length).indexOf(form) : -1;
      if (at >= 0) {
        const taken = this.tokens.splice(0, count);
        this.element.append(this.pending.slice(0, at), span(form, taken));
        this.pending = this.pending.slice(at + form.length);
        return true;
      }
    }
    if (text.startsWith(this.pending) || text.trimStart().startsWith(this.pending)) return false;
    this.tokens.splice(0, count);
    return true;
  }
}

/** Return the text of the first tokens that end with a whole character, and their number. */
function nextText(tokens) {
  const bytes = [];
  for (let count = 1; count <= tokens.length; count++) {
    bytes.push(...tokens[count - 1].bytes);
    try {
      return [utf8.decode(new Uint8Array(bytes)), count];
    } catch {
      if (count >= 4) return [tokens[0].token, 1]; // not UTF-8
    }
  }
  return ["", 0];
}

function span(text, tokens) {
  const element = document.createElement("span");
  const logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
  const probability = Math.exp(logprob);
  element.className = "token";
  element.textContent = text;
  element.style.setProperty("--surprise", (1 - probability).toFixed(3));
  const top = tokens.length === 1 ? tokens[0].top_logprobs : [];
  element.alternatives = { text, probability, top };
  if (top.length && top[0].logprob > tokens[0].logprob) element.classList.add("sampled");
  return element;
}
