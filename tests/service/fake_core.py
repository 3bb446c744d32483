"""A core that can be computed by hand: output token i of a request is `prompt[0] + i`.

Four rows, a queue of two, one prompt token per step for prompts above 100 tokens (a prefill that
lasts), `simulated_step_ms` per step. Run as the rank process: `python -m ... FD PARENT_PID`.
`model` chooses the start-up: fake, fake-slow (until it is told anything), fake-fatal (dies with
last words), fake-broken (has last words, and then hangs).
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from dataclasses import dataclass, field

from engine_service.core.facts import EngineFacts
from engine_service.core.messages import (
    Abort,
    Fatal,
    Finish,
    FinishReason,
    Load,
    Progress,
    Ready,
    Reject,
    SetTracing,
    ShownCanvas,
    Shutdown,
    StepOutput,
    Submit,
    Timings,
    Usage,
)
from engine_service.core.params import PoolFacts, SamplingParams
from engine_service.core.step import Canvas, TokenLogprobs
from engine_service.pipe import BlockingPipe, PeerGone
from tidemill.runtime.errors import InvalidRequest, Overloaded

HEARTBEAT_S = 1.0
MAX_ROWS, MAX_QUEUE, VOCAB, MAX_LEN, LONG = 4, 2, 100_000, 40_000, 100


@dataclass
class Live:
    submit: Submit
    prompt: tuple[int, ...]
    prefill_left: int
    out: int = 0
    started_ns: int = 0
    first_ns: int = 0
    end: Abort | None = None


@dataclass
class FakeCore:
    waiting: list[Live] = field(default_factory=list)
    running: list[Live] = field(default_factory=list)
    seq: int = 0

    def take(self, command: Submit | Abort) -> Reject | None:
        if isinstance(command, Abort):
            for live in self.waiting + self.running:
                if live.submit.key == command.key:
                    live.end = live.end or command
            return None
        prompt = struct.unpack(f"<{len(command.prompt) // 4}I", command.prompt)
        if not prompt:
            error = InvalidRequest("the prompt is empty", param="prompt_token_ids")
            return Reject(command.key, error)
        if len(self.waiting) + len(self.running) >= MAX_ROWS + MAX_QUEUE:
            return Reject(command.key, Overloaded("the queue is full", retry_after_ms=500))
        left = len(prompt) if len(prompt) > LONG else 1
        self.waiting.append(Live(command, prompt, left))
        return None

    def step(self) -> StepOutput:
        now = time.monotonic_ns()
        while self.waiting and len(self.running) < MAX_ROWS:
            self.running.append(self.waiting.pop(0))
            self.running[-1].started_ns = now
        self.seq += 1
        output = StepOutput(self.seq, [], [], b"", [], [], [], [], Load(0, 0, 0, 0, 0))
        tokens = []
        for live in self.running + [one for one in self.waiting if one.end or self.late(one, now)]:
            row = len(output.keys)
            output.keys.append(live.submit.key)
            count = 0
            if live.started_ns and live.end is None:
                live.prefill_left -= 1
                if live.prefill_left <= 0 and live.submit.pool is None:
                    count = 1
                    live.first_ns = live.first_ns or now
                    tokens.append((live.prompt[0] + live.out) % VOCAB)
                    live.out += 1
                    if live.submit.sampling.logprobs is not None:
                        entry = TokenLogprobs((tokens[-1],), (-0.5,), 1)
                        output.logprobs.append((row, [entry]))
                    if live.submit.emit_canvas:
                        output.canvas.append(
                            (
                                row,
                                ShownCanvas(
                                    7, 2, Canvas((1, 2), (True, False), 3, None, (0.75, 0.5))
                                ),
                            )
                        )
            output.counts.append(count)
            if finish := self.finish(live, now):
                output.finished.append((row, finish))
        gone = {output.keys[row] for row, _ in output.finished}
        self.running = [live for live in self.running if live.submit.key not in gone]
        self.waiting = [live for live in self.waiting if live.submit.key not in gone]
        load = Load(len(self.running), len(self.waiting), 0, 16 * len(self.running), 64)
        return output._replace(token_ids=struct.pack(f"<{len(tokens)}I", *tokens), load=load)

    @staticmethod
    def late(live: Live, now: int) -> bool:
        return live.submit.deadline_ns is not None and now >= live.submit.deadline_ns

    def finish(self, live: Live, now: int) -> Finish | None:
        reason, detail, out = None, "", live.out
        if live.end is not None:
            reason, detail = live.end.reason, live.end.detail
            out = out if live.end.completion_tokens is None else live.end.completion_tokens
        elif self.late(live, now):
            reason = FinishReason.DEADLINE
        elif live.submit.pool is not None:
            return self.pooled(live, now) if live.started_ns and live.prefill_left <= 0 else None
        elif live.out >= (live.submit.sampling.max_tokens or MAX_LEN):
            reason = FinishReason.LENGTH
        if reason is None:
            return None
        arrival, started, first = live.submit.arrival_ns, live.started_ns, live.first_ns
        queue = (started or now) - arrival
        prefill = ((first or now) - started) if started else 0
        times = Timings(arrival, queue, prefill, now - first if first else 0)
        usage = Usage(len(live.prompt), 0, out, live.out, 0, 0)
        return Finish(reason, None, detail, usage, times)

    @staticmethod
    def pooled(live: Live, now: int) -> Finish:
        """The question as a vector: length of the prompt, first id, normalize, dimensions."""
        asked, prompt = live.submit.pool, live.prompt
        normalize = -1.0 if asked.normalize is None else float(asked.normalize)
        vector = struct.pack("<4f", len(prompt), prompt[0], normalize, asked.dimensions or 0)
        times = Timings(live.submit.arrival_ns, 0, now - live.submit.arrival_ns, 0)
        usage = Usage(len(prompt), 0, 0, 1, 0, 0)
        return Finish(FinishReason.STOP, None, "", usage, times, (), vector)


FACTS = EngineFacts(
    model_id="fake",
    weight_version="v1",
    architecture="FakeForCausalLM",
    dtype="float32",
    device="cpu",
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    max_rows=MAX_ROWS,
    max_queued_requests=MAX_QUEUE,
    max_logprobs=5,
    page_size=16,
    num_pages=64,
    prefix_caching=False,
    default_method="autoregressive",
    methods=("autoregressive",),
    default_params={"threshold": 0.9},
    block_length=1,
    mask_token_id=None,
    eos_token_ids=(2,),
    default_sampling=SamplingParams(temperature=1.0, top_k=0),
    tokenizer_dir="",
    stage_seconds={},
    pooling=PoolFacts(architecture="FakeForCausalLM", dimensions=4, kind="last"),
)


def main() -> None:
    pipe = BlockingPipe(socket.socket(fileno=int(sys.argv[1])))
    config, *more = pipe.receive(None)
    pipe.send([Progress("loading weights", 1, 4)])
    if config.model == "fake-slow" and isinstance((more or pipe.receive(None))[0], Shutdown):
        return
    if config.model == "fake-broken":
        pipe.send([Fatal("CUDA error: an illegal memory access was encountered")])
        time.sleep(600)
    if config.model in ("fake-fatal", "fake-refused"):
        is_refusal = config.model == "fake-refused"
        pipe.send([Fatal("the fake model has no weights", is_refusal)])
        return
    pipe.send([Ready(FACTS)])
    core = FakeCore()
    while True:
        busy = core.running or core.waiting
        commands = pipe.receive(0.0 if busy else HEARTBEAT_S)
        if not busy and not commands:
            pipe.send([core.step()])
        for command in commands:
            if isinstance(command, Shutdown):
                return
            if isinstance(command, SetTracing):
                continue
            if (reject := core.take(command)) is not None:
                pipe.send([reject])
        if core.running or core.waiting:
            time.sleep(config.simulated_step_ms / 1000)
            pipe.send([core.step()])


if __name__ == "__main__":
    try:
        main()
    except PeerGone:
        sys.exit(0)
