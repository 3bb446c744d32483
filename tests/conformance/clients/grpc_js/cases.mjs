// @grpc/grpc-js on the contracts in proto/: every kind of call, trailers, deadlines, errors, leaving.
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { abandoned, grpcAddress, person, tom } from "../server.mjs";

const protos = fileURLToPath(new URL("../../../../proto", import.meta.url));
const definition = loadSync("tidemill/v1/text.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  oneofs: true,
});
const { TextService } = grpc.loadPackageDefinition(definition).tidemill.v1;
const service = new TextService(grpcAddress, grpc.credentials.createInsecure());
after(() => service.close());

const user = (text) => ({ role: "user", parts: [{ text }] });
const messages = [user("json: tom 31 rome")];
const options = (max_tokens, more) => ({ sampling: { temperature: 0, max_tokens }, ...more });
const within = (seconds) => ({ deadline: Date.now() + 1000 * seconds });

// A unary call: its answer and its trailers.
function call(method, asked, { metadata = new grpc.Metadata(), seconds = 60 } = {}) {
  return new Promise((resolve, reject) => {
    let answer;
    const running = service[method](asked, metadata, within(seconds), (error, found) => {
      if (error) reject(error);
      answer = found;
    });
    running.on("status", (status) => resolve({ answer, trailers: status.metadata }));
  });
}

async function read(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const textOf = (events) =>
  events.flatMap((event) => event.choice?.message?.parts ?? []).map((part) => part.text).join("");

test("a chat, whole and streamed", async () => {
  const { answer, trailers } = await call("Chat", { messages, options: options(60) });
  const [choice] = answer.choices;
  assert.deepEqual(JSON.parse(choice.message.parts[0].text), tom);
  assert.equal(choice.finish_reason, "stop");
  assert(answer.usage.output_tokens > 0);
  assert(Object.keys(trailers.getMap()).length > 0);
  const events = await read(service.ChatStream({ messages, options: options(60) }, within(60)));
  assert.equal(textOf(events), choice.message.parts[0].text);
  const last = events.at(-1);
  assert.equal(last.choice ?? null, null);
  assert.equal(last.usage.output_tokens, answer.usage.output_tokens);
});

test("texts, tokens and back", async () => {
  const prompt = { text: "add: 123+456 =" };
  const { answer } = await call("Generate", { prompt, options: options(8) });
  assert.match(answer.choices[0].text, /579/);
  const tokens = (await call("Tokenize", { text: prompt.text })).answer.token_ids;
  assert.equal((await call("Detokenize", { token_ids: tokens })).answer.text, prompt.text);
  const models = (await call("ListModels", {})).answer.models;
  assert.deepEqual(models.map((model) => model.id), ["demo"]);
});

test("calls that are forced, and a schema", async () => {
  const tools = [{ name: "save_person", parameters_json_schema: JSON.stringify(person) }];
  const chat = { tools, tool_choice: { function_name: "save_person" } };
  const { answer } = await call("Chat", { messages, options: options(80), chat });
  const [made] = answer.choices[0].message.tool_calls;
  assert.deepEqual([made.name, JSON.parse(made.arguments_json)], ["save_person", tom]);
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  const events = await read(service.ChatStream({ messages, options: options(80), chat }, within(60)));
  const pieces = events.flatMap((event) => event.choice?.message?.tool_calls ?? []);
  assert.deepEqual(JSON.parse(pieces.map((piece) => piece.arguments_json).join("")), tom);
  const constraint = { json_schema: JSON.stringify(person) };
  const held = await call("Chat", {
    messages: [user("hi")],
    options: options(300, { constraint }),
  });
  const text = held.answer.choices[0].message.parts[0].text;
  assert.deepEqual(Object.keys(JSON.parse(text)), Object.keys(tom));
});

test("errors have codes and details", async () => {
  const { INVALID_ARGUMENT, NOT_FOUND, DEADLINE_EXCEEDED } = grpc.status;
  const bad = [
    ["Chat", { options: options(5) }, INVALID_ARGUMENT, "messages"],
    ["Chat", { messages, options: { sampling: { temperature: -1 } } }, INVALID_ARGUMENT, "temperature"],
    ["Generate", { prompt: { text: "a".repeat(3000) } }, INVALID_ARGUMENT, "maximum context"],
    ["Chat", { messages, options: options(5, { model: "gpt-9" }) }, NOT_FOUND, "gpt-9"],
  ];
  for (const [method, asked, code, words] of bad) {
    await assert.rejects(call(method, asked), (error) => {
      assert.equal(error.code, code);
      assert(error.details.includes(words), error.details);
      assert.equal(error.metadata.get("grpc-status-details-bin").length, 1);
      return true;
    });
  }
  const endless = { prompt: { text: "ROMEO:" }, options: options(1900, { ignore_eos: true }) };
  await assert.rejects(call("Generate", endless, { seconds: 0.25 }), { code: DEADLINE_EXCEEDED });
});

test("a stream that is cancelled", () =>
  abandoned(async () => {
    const endless = { messages: [user("ROMEO:")], options: options(1900, { ignore_eos: true }) };
    const stream = service.ChatStream(endless, within(60));
    await assert.rejects(
      (async () => {
        for await (const event of stream) if (event.choice) stream.cancel();
      })(),
      { code: grpc.status.CANCELLED },
    );
  }));
