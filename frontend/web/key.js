// The key that some servers ask for. It is kept while the page is open and nowhere else.

let key = "";

/** Shows `text` with every call from now on. */
export function learn(text) {
  key = text.trim();
}

/** `fetch`, with the key if there is one. */
export function call(path, options = {}) {
  if (key === "") return fetch(path, options);
  return fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${key}` } });
}
