// Server-sent events out of a fetch body. It does not know what the events mean.

/**
 * The `data` of each event, in order. Bytes may be cut anywhere: inside a character, between CR
 * and LF, inside a field. An event that the end of the stream cuts off is dropped.
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let lines = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A CR at the very end may be half of a CR LF: it waits for what follows.
      const parts = rest.split(/\r\n|\n|\r(?!$)/);
      rest = parts.pop();
      for (const line of parts) {
        if (line !== "") {
          const [, name, text] = /^([^:]*)(?:: ?)?(.*)$/s.exec(line);
          if (name === "data") lines.push(text);
        } else if (lines.length) {
          yield lines.join("\n");
          lines = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader left early, or the stream has failed already
  }
}
