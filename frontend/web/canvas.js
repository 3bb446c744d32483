// The cells of a canvas: one per position, masked, tentative or fixed, and when it was fixed.
// It does not know where events come from; text gets into the page as textContent only.

import { call } from "/ui/key.js";

const MASK = "\u2591";
const SHOWN = { " ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u21b5" };
const FIXED = "fixed";
const MOST_IDS = 512;

/** Texts of tokens by id, asked from the server in batches, each once. */
export class Pieces {
  #texts = new Map();
  #wanted = [];

  /** Called when texts have arrived. */
  arrived = () => {};

  /** The text, or undefined until the server has answered. */
  text(id) {
    if (!this.#texts.has(id)) {
      this.#texts.set(id, undefined);
      this.#wanted.push(id);
      if (this.#wanted.length === 1) queueMicrotask(() => this.#ask());
    }
    return this.#texts.get(id);
  }

  async #ask() {
    const ids = this.#wanted;
    this.#wanted = [];
    for (let i = 0; i < ids.length; i += MOST_IDS) await this.#fetch(ids.slice(i, i + MOST_IDS));
    this.arrived();
  }

  async #fetch(ids) {
    try {
      const answer = await call(`/ui/pieces?ids=${ids.join(",")}`);
      const { pieces } = await answer.json();
      ids.forEach((id, i) => this.#texts.set(id, pieces[i]));
    } catch {
      // The stream tells why there is no answer. The cells stay empty until they are asked again.
      ids.forEach((id) => this.#texts.delete(id));
    }
  }
}

/** What is known of every generated position, and its cells in `root`. */
export class Canvas {
  #root;
  #facts;
  #pieces;
  #cells = [];
  #numCommitted = 0;
  #promptLen = 0;
  #block = null;
  #step = 0;
  #lastStep = 1;
  #moment = 0;

  constructor(root, facts, pieces) {
    this.#root = root;
    this.#facts = facts;
    this.#pieces = pieces;
    pieces.arrived = () => this.#cells.forEach((cell) => this.#write(cell));
    root.replaceChildren();
    root.style.setProperty("--last", 1);
  }

  /** How often something was revealed: the last value of `show`. */
  get numMoments() {
    return this.#moment;
  }

  /** One state of the open block; `usage` counts what has been committed before it. */
  open({ block, step, token_ids: ids, fixed, confidence = [] }, usage) {
    this.#promptLen = usage.prompt_tokens;
    const start = usage.completion_tokens;
    const length = this.#facts.block_length;
    this.#block ??= length > 0 ? Math.floor(this.#promptLen / length) : block;
    const isLater = block !== this.#block;
    // What was committed without having been seen: by this step, or by the last of its block.
    const before = isLater ? this.#step + 1 : step;
    this.#moment += 1;
    for (let i = 0; i < start; i += 1) {
      if (this.#cell(i).state !== FIXED) this.#fix(this.#cells[i], before);
    }
    ids.forEach((id, i) => {
      const cell = this.#cell(start + i);
      if (fixed[i] && cell.state !== FIXED) cell.sure = confidence[i];
      if (fixed[i]) this.#reveal(cell, id, step);
      else this.#set(cell, id, id === this.#facts.mask_token_id ? "masked" : "tentative");
    });
    this.#truncate(start + ids.length);
    this.#block = block;
    this.#step = step;
    this.#describe();
  }

  /** Tokens that are final now; their canvas, if they had one, was told before. */
  commit(ids) {
    const isNews = ids.some((_, i) => this.#cell(this.#numCommitted + i).state !== FIXED);
    if (isNews) this.#moment += 1;
    for (const id of ids) this.#reveal(this.#cell(this.#numCommitted++), id, this.#step + 1);
    this.#describe();
  }

  /** Nothing more will come: positions that were never committed go. */
  close() {
    this.#truncate(this.#numCommitted);
    this.#describe();
  }

  /** The canvas as it was after `moment` reveals. */
  show(moment) {
    for (const cell of this.#cells) {
      cell.node.classList.toggle("later", cell.moment > moment);
      this.#write(cell);
    }
  }

  #cell(i) {
    while (this.#cells.length <= i) {
      const node = document.createElement("span");
      node.className = "cell masked";
      node.textContent = MASK;
      this.#root.append(node);
      const cell = { node, id: null, state: "masked", step: 0, moment: 0 };
      this.#cells.push(cell);
      const length = this.#facts.block_length;
      const at = this.#promptLen + this.#cells.length;
      if (length > 0 && at % length === 0) node.classList.add("border");
    }
    return this.#cells[i];
  }

  #reveal(cell, id, step) {
    cell.id = id;
    if (cell.state === FIXED) this.#write(cell);
    else this.#fix(cell, step);
  }

  #fix(cell, step) {
    cell.step = step;
    cell.moment = this.#moment;
    if (step > this.#lastStep) {
      this.#lastStep = step;
      this.#root.style.setProperty("--last", step);
    }
    cell.node.style.setProperty("--step", step);
    const sure = cell.sure === undefined ? "" : `, ${Math.round(100 * cell.sure)} % sure`;
    cell.node.title = `fixed in step ${step} of its block${sure}`;
    this.#set(cell, cell.id, FIXED);
  }

  #set(cell, id, state) {
    if (cell.state !== state) cell.node.classList.replace(cell.state, state);
    cell.id = id;
    cell.state = state;
    this.#write(cell);
  }

  #write(cell) {
    const isMasked = cell.state === "masked" || cell.node.classList.contains("later");
    const text = isMasked ? MASK : cell.id === null ? "" : (this.#pieces.text(cell.id) ?? "");
    const shown = SHOWN[text] ?? text;
    if (cell.node.textContent !== shown) cell.node.textContent = shown;
  }

  #truncate(length) {
    for (const cell of this.#cells.splice(length)) cell.node.remove();
  }

  #describe() {
    const numFixed = this.#cells.filter((cell) => cell.state === FIXED).length;
    this.#root.setAttribute("aria-label", `${numFixed} of ${this.#cells.length} positions fixed`);
  }
}
