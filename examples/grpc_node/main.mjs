// TextService over gRPC from Node: @grpc/grpc-js on the contracts in proto/, nothing generated.
//
// usage: node main.mjs [HOST:PORT]
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const address = process.argv[2] ?? process.env.TIDEMILL_GRPC ?? "127.0.0.1:50051";
const protos = fileURLToPath(new URL("../../proto", import.meta.url));
// keepCase: fields are called as in the .proto files. 64-bit numbers come as strings.
const definition = loadSync("tidemill/v1/text.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  oneofs: true,
});
const { TextService } = grpc.loadPackageDefinition(definition).tidemill.v1;
const service = new TextService(address, grpc.credentials.createInsecure());

const user = (text) => ({ role: "user", parts: [{ text }] });
const options = (max_tokens) => ({ sampling: { temperature: 0, max_tokens } });
const within = (seconds) => ({ deadline: Date.now() + 1000 * seconds });

// A whole answer. Every call takes a deadline; the engine stops when it has passed.
const chat = promisify(service.Chat.bind(service));
const asked = { messages: [user("reverse: harbour")], options: options(40) };
const answer = await chat(asked, new grpc.Metadata(), within(60));
console.log("chat:  ", answer.choices[0].message.parts[0].text);

// A stream of deltas. The last message has the usage and no choice.
let text = "";
const counting = { messages: [user("count: 37 n=5")], options: options(40) };
for await (const event of service.ChatStream(counting, within(60))) {
  for (const part of event.choice?.message?.parts ?? []) text += part.text;
  if (!event.choice) console.log("stream:", text, ` (${event.usage.output_tokens} tokens)`);
}

// Leaving a stream: `cancel` frees its row and its pages in the engine.
const long = { prompt: { text: "ROMEO:" }, options: options(1000) };
const stream = service.GenerateStream(long, within(60));
try {
  for await (const event of stream) {
    console.log("cancel:", JSON.stringify(event.choice.text), "and no more");
    stream.cancel();
  }
} catch (error) {
  if (error.code !== grpc.status.CANCELLED) throw error;
}

// What is wrong with a request is said in the status, before anything is computed.
try {
  await chat({ options: options(40) }, new grpc.Metadata(), within(60));
} catch (error) {
  console.log("error: ", grpc.status[error.code], "-", error.details);
}
service.close();
