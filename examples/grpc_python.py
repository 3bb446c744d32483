"""TextService over gRPC from Python, with nothing but the generated stubs.

usage: python examples/grpc_python.py [HOST:PORT]

`tidemill.Client` does the same with fewer words; this is what it does underneath, and what a client
in any other language does.
"""

import os
import sys

import grpc

from tidemill.v1 import engine_pb2, text_pb2, text_pb2_grpc

ADDRESS = os.environ.get("TIDEMILL_GRPC", "127.0.0.1:50051")


def user(text: str) -> text_pb2.ChatMessage:
    """One turn of the user."""
    return text_pb2.ChatMessage(role="user", parts=[text_pb2.ContentPart(text=text)])


def options(max_tokens: int) -> text_pb2.TextOptions:
    """Greedy, and no longer than `max_tokens`."""
    sampling = engine_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return text_pb2.TextOptions(sampling=sampling)


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    with grpc.insecure_channel(address) as channel:
        service = text_pb2_grpc.TextServiceStub(channel)

        # A whole answer. Every call takes a deadline; the engine stops when it has passed.
        asked = text_pb2.ChatRequest(messages=[user("reverse: harbour")], options=options(40))
        answer = service.Chat(asked, timeout=60)
        print("chat:  ", answer.choices[0].message.parts[0].text)

        # A stream of deltas. The last message has the usage and no choice.
        print("stream: ", end="")
        for event in service.ChatStream(
            text_pb2.ChatStreamRequest(messages=[user("count: 37 n=5")], options=options(40)),
            timeout=60,
        ):
            if event.HasField("choice"):
                for part in event.choice.message.parts:
                    print(part.text, end="", flush=True)
            else:
                print(f"  ({event.usage.output_tokens} tokens)")

        # Leaving a stream: `cancel` frees its row and its pages in the engine.
        long = text_pb2.GenerateStreamRequest(
            prompt=text_pb2.Prompt(text="ROMEO:"), options=options(1000)
        )
        stream = service.GenerateStream(long, timeout=60)
        print("cancel:", repr(next(stream).choice.text), "and no more")
        stream.cancel()

        # What is wrong with a request is said in the status, before anything is computed.
        try:
            service.Chat(text_pb2.ChatRequest(options=options(40)), timeout=60)
        except grpc.RpcError as error:
            print("error: ", error.code().name, "-", error.details())


if __name__ == "__main__":
    main()
