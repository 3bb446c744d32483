// OpenAI's Node SDK with the base URL changed: chat, stream, a tool, JSON by a schema.
//
// usage: node main.mjs [http://HOST:PORT/v1]
import OpenAI, { BadRequestError } from "openai";

const baseURL = process.argv[2] ?? process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1";
const client = new OpenAI({ baseURL, apiKey: "none" });
const model = "demo";
const user = (content) => [{ role: "user", content }];
const person = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

const answer = await client.chat.completions.create({ model, messages: user("reverse: harbour") });
console.log("chat:  ", answer.choices[0].message.content);

let text = "";
const stream = await client.chat.completions.create({
  model,
  messages: user("count: 37 n=5"),
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) console.log("stream:", text, ` (${chunk.usage.completion_tokens} tokens)`);
}

// A forced call: its arguments follow the tool's schema, whatever the model would say.
const name = "save_person";
const called = await client.chat.completions.create({
  model,
  messages: user("json: tom 31 rome"),
  tools: [{ type: "function", function: { name, parameters: person } }],
  tool_choice: { type: "function", function: { name } },
});
const [call] = called.choices[0].message.tool_calls;
console.log("tool:  ", call.function.name, JSON.parse(call.function.arguments));

const structured = await client.chat.completions.create({
  model,
  messages: user("json: ada 36 london"),
  response_format: { type: "json_schema", json_schema: { name: "person", schema: person } },
});
console.log("schema:", JSON.parse(structured.choices[0].message.content));

try {
  await client.chat.completions.create({ model, messages: user("hi"), temperature: -1 });
} catch (error) {
  if (!(error instanceof BadRequestError)) throw error;
  console.log("error: ", error.status, error.param, "-", error.error.message);
}
