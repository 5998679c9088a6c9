// The most likely tokens at the position of one: shown under the pointer, or with the arrow keys.

const box = document.getElementById("alternatives");

/** Show the alternatives of the tokens in this element. */
export function watch(element) {
  element.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
  element.addEventListener("pointerleave", hide);
  element.addEventListener("focusout", hide);
  element.addEventListener("scroll", hide);
  element.addEventListener("keydown", move);
}

function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const text = event.target.closest(".tokens");
  if (event.key === "Escape") hide();
  if (!step || !text) return;
  event.preventDefault();
  const tokens = [...text.querySelectorAll(".token")];
  const index = tokens.indexOf(text.querySelector(".current")) + step;
  show(tokens[Math.max(0, Math.min(tokens.length - 1, index))]);
}

function show(token) {
  hide();
  if (!token || !document.body.classList.contains("show-probabilities")) return;
  token.classList.add("current");
  box.replaceChildren(table(token.alternatives));
  box.hidden = false;
  const [at, size] = [token.getClientRects()[0], box.getBoundingClientRect()];
  const above = at.bottom + size.height + 8 > innerHeight;
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 4))}px`;
  box.style.top = `${above ? at.top - size.height - 4 : at.bottom + 4}px`;
}

function hide() {
  box.hidden = true;
  document.querySelector(".token.current")?.classList.remove("current");
}

function table({ text, probability, top }) {
  const rows = top.map((one) => [visible(one.token), Math.exp(one.logprob)]);
  const name = visible(text);
  if (!rows.some(([other]) => other === name)) rows.push([name, probability]);
  const element = document.createElement("table");
  for (const [shown, value] of rows) {
    const row = element.insertRow();
    row.className = shown === name ? "chosen" : "";
    row.insertCell().textContent = shown;
    const cell = row.insertCell();
    const meter = document.createElement("meter");
    meter.value = value;
    cell.append(percent(value), meter);
  }
  return element;
}

function percent(value) {
  return value >= 0.001 ? `${(100 * value).toFixed(1)} %` : "< 0.1 %";
}

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}
