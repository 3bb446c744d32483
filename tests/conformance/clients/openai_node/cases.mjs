// OpenAI's Node SDK: chats, responses, tools, schemas, embeddings, errors, leaving.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { APIUserAbortError, BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { abandoned, busy, person, tom, url } from "../server.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const model = "demo";
const messages = [{ role: "user", content: "json: tom 31 rome" }];
const long = { model, messages: [{ role: "user", content: "ROMEO:" }], max_tokens: 1900, ignore_eos: true };
const name = "save_person";
const tools = [{ type: "function", function: { name, parameters: person } }];
const named = { type: "function", function: { name } };
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });

test("a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create({ model, messages });
  assert.deepEqual(JSON.parse(whole.choices[0].message.content), tom);
  assert.equal(whole.id, `chatcmpl-${whole._request_id}`);
  const stream = client.chat.completions.stream({
    model,
    messages,
    stream_options: { include_usage: true },
  });
  const last = await stream.finalChatCompletion();
  assert.equal(last.choices[0].message.content, whole.choices[0].message.content);
  assert.deepEqual(last.usage.completion_tokens, whole.usage.completion_tokens);
});

test("calls that are forced, and their results", async () => {
  const asked = { model, messages, tools, max_tokens: 300 };
  const whole = await client.chat.completions.create({ ...asked, tool_choice: named });
  const [call] = whole.choices[0].message.tool_calls;
  assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], [name, tom]);
  const stream = client.chat.completions.stream({ ...asked, tool_choice: named });
  const streamed = (await stream.finalMessage()).tool_calls;
  assert.deepEqual(JSON.parse(streamed[0].function.arguments), tom);
  const one = await client.chat.completions.create({
    ...asked,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  assert.equal(one.choices[0].message.tool_calls.length, 1);
  const result = { role: "tool", tool_call_id: call.id, content: "saved" };
  const free = await client.chat.completions.create({
    ...asked,
    messages: [...messages, whole.choices[0].message, result],
    max_tokens: 20,
  });
  assert(free.choices[0].message.content);
  assert.equal(free.choices[0].message.tool_calls, undefined);
});

test("schemas", async () => {
  const parsed = await client.chat.completions.parse({
    model,
    messages,
    response_format: zodResponseFormat(Person, "person"),
  });
  assert.deepEqual(parsed.choices[0].message.parsed, tom);
  const response = await client.responses.parse({
    model,
    input: messages[0].content,
    text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(response.output_parsed, tom);
});

test("responses, whole and streamed, and their calls", async () => {
  const input = messages[0].content;
  const whole = await client.responses.create({ model, input });
  assert.deepEqual(JSON.parse(whole.output_text), tom);
  const stream = client.responses.stream({ model, input });
  const kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  assert(kinds.has("response.output_text.delta") && kinds.has("response.completed"));
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  const called = await client.responses.create({
    model,
    input,
    tools: [{ type: "function", name, parameters: person, strict: true }],
    tool_choice: { type: "function", name },
  });
  assert.deepEqual(JSON.parse(called.output[0].arguments), tom);
  const items = [];
  for await (const item of client.responses.inputItems.list(whole.id)) items.push(item);
  assert.deepEqual(items.map((item) => item.content[0].text), [input]);
});

test("embeddings and models", async () => {
  const packed = await client.embeddings.create({ model, input: "tide" });
  const plain = await client.embeddings.create({ model, input: "tide", encoding_format: "float" });
  const [one, other] = [packed.data[0].embedding, plain.data[0].embedding];
  assert.equal(one.length, other.length);
  one.forEach((value, i) => assert(Math.abs(value - other[i]) < 1e-6));
  const ids = [];
  for await (const card of client.models.list()) ids.push(card.id);
  assert.deepEqual(ids, [model]);
});

test("errors", async () => {
  const bad = [
    [{ temperature: -1 }, "temperature"],
    [{ messages: [{ role: "wizard", content: "hi" }] }, "messages[0].role"],
    [{ messages: [{ role: "user", content: "a".repeat(3000) }] }, "messages"],
    [{ tool_choice: "required" }, "tool_choice"],
  ];
  for (const [fields, param] of bad) {
    await assert.rejects(client.chat.completions.create({ model, messages, ...fields }), (error) => {
      assert(error instanceof BadRequestError);
      assert.deepEqual([error.status, error.param], [400, param]);
      return true;
    });
  }
  const wrong = client.chat.completions.create({ model: "gpt-9", messages });
  await assert.rejects(wrong, (error) => {
    assert(error instanceof NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
});

test("a stream that is left by breaking out of it", () =>
  abandoned(async () => {
    const stream = await client.chat.completions.create({ ...long, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  }));

test("a call that is aborted", () =>
  abandoned(async () => {
    const controller = new AbortController();
    const call = client.chat.completions.create(long, { signal: controller.signal });
    const given = assert.rejects(call, APIUserAbortError);
    await busy();
    controller.abort();
    await given;
  }));
