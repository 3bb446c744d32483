// What the Node clients share: where the server is, and what it counts.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";

export const url = process.env.TIDEMILL_URL;
export const grpcAddress = process.env.TIDEMILL_GRPC;

// A schema of what `demo` answers to `json: tom 31 rome`.
export const person = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};
export const tom = { name: "tom", age: 31, city: "rome" };

const PATIENCE_MS = 60_000;

// Requests whose clients went away before their answer was whole.
async function numCancelled() {
  const metrics = await (await fetch(`${url}/metrics`)).text();
  assert.match(metrics, /tidemill_num_requests_running/);
  const found = metrics.match(/^tidemill_request_failure_total{error_type="cancelled".*} (\S+)/m);
  return found ? Number(found[1]) : 0;
}

async function numRequests() {
  const { requests } = await (await fetch(`${url}/health`)).json();
  assert.equal(typeof requests, "number");
  return requests;
}

async function until(condition, otherwise) {
  const deadline = Date.now() + PATIENCE_MS;
  while (!(await condition())) {
    assert(Date.now() < deadline, otherwise);
    await setTimeout(20);
  }
}

// Returns once the server works on a request.
export const busy = () => until(async () => (await numRequests()) > 0, "no request came");

// `leave` leaves one request, which must end as one that nobody wants: not as finished, and with
// nothing left in the frontend.
export async function abandoned(leave) {
  const isIdle = async () => (await numRequests()) === 0;
  await until(isIdle, "an earlier request does not end");
  const before = await numCancelled();
  await leave();
  const isOver = async () => (await isIdle()) && (await numCancelled()) === before + 1;
  await until(isOver, "the server did not notice that its client left");
}
