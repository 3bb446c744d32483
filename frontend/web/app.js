// The page: asks for a generation and shows its reasoning, its text, its canvas and its counters.
// Whatever a model or a server says is put in as text, never as HTML.

import { Canvas, Pieces } from "/ui/canvas.js";
import { call, learn } from "/ui/key.js";
import { events } from "/ui/sse.js";

const EXAMPLES = {
  chat: [
    "sort: dbca",
    "reverse: harbour",
    "repeat: tide n=3",
    "json: tom 31 rome",
    "count: 37 n=5",
    "lookup: abc=1234 xyz=0420 get xyz",
  ],
  completion: ["ROMEO:", "sort: dbca =", "reverse: harbour =", "add: 123+456 ="],
};
const KNOBS = ["temperature", "max_tokens"];
const DIFFUSION_KNOBS = ["remasking", "threshold", "steps"];
const RETRY_MS = 1000;
const LOST = "The connection to the server was lost.";

const at = (id) => document.getElementById(id);
const text = document.createTextNode("");
const reasoning = document.createTextNode("");
const pieces = new Pieces();
let model = null;
let running = null;
let canvas = null;

/** An answer of the server that says what is wrong. */
class Refusal extends Error {}

async function refusal(answer) {
  at("key-field").hidden &&= answer.status !== 401;
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not one of our own error bodies: something between here and the server spoke.
  }
  const seconds = answer.headers.get("retry-after");
  return new Refusal(seconds ? `${message} (Try again in ${seconds} s.)` : message);
}

async function ask(path) {
  const answer = await call(path);
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

async function connect() {
  try {
    const [cards, facts] = await Promise.all([ask("/v1/models"), ask("/ui/model")]);
    meet({ ...cards.data[0], ...facts });
  } catch (failure) {
    at("model").textContent = failure instanceof Refusal ? failure.message : LOST;
    if (at("key-field").hidden) setTimeout(connect, RETRY_MS); // else the key is what is missing
  }
}

function meet(card) {
  model = { ...card, isDiffusion: card.default_method !== "autoregressive" };
  const method = card.default_method.replaceAll("_", " ");
  at("model").textContent = `${card.id} · ${method} · ${card.max_model_len} tokens`;
  at("diffusion").hidden = !model.isDiffusion;
  at("mode").hidden = !card.has_chat_template;
  chooseMode(card.has_chat_template ? "chat" : "completion");
  at("run").disabled = false;
  document.body.dataset.ready = "true";
}

function mode() {
  return new FormData(at("form")).get("mode");
}

function chooseMode(name) {
  document.querySelector(`input[name=mode][value=${name}]`).checked = true;
  at("prompt-label").textContent = name === "chat" ? "Message" : "Text to continue";
  const chips = EXAMPLES[name].map((example) => {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.className = "chip";
    chip.textContent = example;
    chip.addEventListener("click", () => {
      at("prompt").value = example;
      run();
    });
    return chip;
  });
  at("examples").replaceChildren(...chips);
}

/** The request's body. An empty knob is left out: the model's own value counts. */
function requestBody() {
  const prompt = at("prompt").value;
  const isChat = mode() === "chat";
  const body = {
    model: model.id,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_token_ids: true,
  };
  if (model.isDiffusion) body.stream_options.include_canvas = true;
  for (const name of model.isDiffusion ? [...KNOBS, ...DIFFUSION_KNOBS] : KNOBS) {
    const { type, value } = at(name);
    if (value.trim() !== "") body[name] = type === "number" ? Number(value) : value.trim();
  }
  return [isChat ? "/v1/chat/completions" : "/v1/completions", body];
}

function clear() {
  text.data = reasoning.data = "";
  at("text").replaceChildren(text);
  at("reasoning").replaceChildren(reasoning);
  at("reasoning-section").hidden = true;
  at("error").hidden = true;
  at("error").textContent = "";
  for (const name of ["forwards", "per_forward", "rate"]) at(name).textContent = "–";
  at("tokens").textContent = "0";
  at("canvas-section").hidden = !model.isDiffusion;
  at("replay").hidden = true;
  canvas = model.isDiffusion ? new Canvas(at("canvas"), model, pieces) : null;
}

function enter(state, isBusy) {
  at("state").textContent = state;
  at("text").setAttribute("aria-busy", String(isBusy));
  at("stop").disabled = !isBusy;
  document.body.dataset.state = state;
}

async function run() {
  if (model === null || at("prompt").value === "") return;
  running?.abort();
  const own = new AbortController();
  running = own;
  clear();
  enter("running", true);
  let end = "done";
  try {
    end = await generate(own.signal);
  } catch (failure) {
    if (running !== own) return; // another run has taken the page
    end = own.signal.aborted ? "stopped" : "failed";
    if (end === "failed") complain(failure instanceof Refusal ? failure.message : LOST);
  }
  if (running !== own) return;
  running = null;
  finish(end);
}

async function generate(signal) {
  const [path, body] = requestBody();
  const started = performance.now();
  const answer = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw await refusal(answer);
  let end = "done";
  for await (const event of events(answer.body)) {
    signal.throwIfAborted(); // a slower run that was replaced shows nothing more
    if (event === "[DONE]") return end;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Refusal(chunk.error.message);
    end = show(chunk) ?? end;
    count(chunk.usage, performance.now() - started);
  }
  throw new Error("the stream has no end");
}

/** Makes a change to a box that scrolls; who is at its end stays there. */
function follow(box, change) {
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
  change();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

/** Shows one chunk; returns why the text ended, if it did. */
function show({ canvas: state, choices, usage }) {
  if (state && canvas) follow(at("canvas"), () => canvas.open(state, usage));
  for (const choice of choices) {
    if (canvas && choice.token_ids) canvas.commit(choice.token_ids);
    const { reasoning_content: thought, content } = choice.delta ?? { content: choice.text };
    if (thought) {
      at("reasoning-section").hidden = false;
      follow(at("reasoning"), () => reasoning.appendData(thought));
    }
    if (content) follow(at("text"), () => text.appendData(content));
    if (choice.finish_reason) return `done: ${choice.finish_reason}`;
  }
  return undefined;
}

function count(usage, elapsedMs) {
  if (!usage) return;
  const numTokens = usage.completion_tokens;
  const numForwards = usage.completion_tokens_details.forward_passes;
  at("tokens").textContent = String(numTokens);
  if (numTokens > 0) at("rate").textContent = ((1000 * numTokens) / elapsedMs).toFixed(1);
  if (numForwards > 0) {
    at("forwards").textContent = String(numForwards);
    at("per_forward").textContent = (numTokens / numForwards).toFixed(2);
  }
}

function finish(end) {
  if (canvas) {
    canvas.close();
    at("replay").hidden = canvas.numMoments === 0;
    at("moment").max = at("moment").value = String(canvas.numMoments);
  }
  enter(end, false);
}

function complain(message) {
  at("error").textContent = message;
  at("error").hidden = false;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("form").addEventListener("change", (event) => {
  if (event.target.name === "mode") chooseMode(event.target.value);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  run();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("key").addEventListener("change", () => {
  learn(at("key").value);
  if (model === null) connect();
});
at("stop").addEventListener("click", () => running?.abort());
at("moment").addEventListener("input", () => canvas.show(Number(at("moment").value)));
at("run").disabled = true;
connect();
