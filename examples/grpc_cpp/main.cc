// TextService over gRPC from C++: an answer, a stream, a stream that is left, an error.
//
// usage: build/grpc_cpp/chat [HOST:PORT]
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>

#include "tidemill/v1/text.grpc.pb.h"

namespace pb = tidemill::v1;

// Every call takes a deadline; the engine stops when it has passed.
void SetDeadline(grpc::ClientContext& call) {
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

// A turn of the user; greedy, and no longer than `max_tokens`. ChatRequest and ChatStreamRequest have
// the same fields.
template <typename Request>
Request Ask(const std::string& text, int max_tokens) {
  Request asked;
  auto* turn = asked.add_messages();
  turn->set_role("user");
  turn->add_parts()->set_text(text);
  asked.mutable_options()->mutable_sampling()->set_temperature(0);
  asked.mutable_options()->mutable_sampling()->set_max_tokens(max_tokens);
  return asked;
}

int Fail(const grpc::Status& status) {
  std::cerr << status.error_code() << ": " << status.error_message() << "\n";
  return 1;
}

int main(int argc, char** argv) {
  const char* named = std::getenv("TIDEMILL_GRPC");
  const std::string address = argc > 1 ? argv[1] : named ? named : "127.0.0.1:50051";
  auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  auto service = pb::TextService::NewStub(channel);
  {
    grpc::ClientContext call;
    SetDeadline(call);
    pb::ChatResponse answer;
    auto status = service->Chat(&call, Ask<pb::ChatRequest>("reverse: harbour", 40), &answer);
    if (!status.ok()) return Fail(status);
    std::cout << "chat:   " << answer.choices(0).message().parts(0).text() << "\n";
  }
  {
    // A stream of deltas. The last message has the usage and no choice.
    grpc::ClientContext call;
    SetDeadline(call);
    auto stream = service->ChatStream(&call, Ask<pb::ChatStreamRequest>("count: 37 n=5", 40));
    pb::ChatStreamResponse event;
    std::cout << "stream: ";
    while (stream->Read(&event)) {
      for (const auto& part : event.choice().message().parts()) {
        std::cout << part.text() << std::flush;
      }
      if (!event.has_choice()) {
        std::cout << "  (" << event.usage().output_tokens() << " tokens)\n";
      }
    }
    auto status = stream->Finish();
    if (!status.ok()) return Fail(status);
  }
  {
    // Leaving a stream: TryCancel frees its row and its pages in the engine.
    grpc::ClientContext call;
    SetDeadline(call);
    auto stream = service->ChatStream(&call, Ask<pb::ChatStreamRequest>("ROMEO:", 1000));
    pb::ChatStreamResponse event;
    stream->Read(&event);
    call.TryCancel();
    while (stream->Read(&event)) {
    }
    auto status = stream->Finish();
    if (status.error_code() != grpc::StatusCode::CANCELLED) return Fail(status);
    std::cout << "cancel: the stream is left\n";
  }
  {
    // What is wrong with a request is said in the status, before anything is computed.
    grpc::ClientContext call;
    SetDeadline(call);
    pb::ChatResponse answer;
    auto status = service->Chat(&call, pb::ChatRequest(), &answer);
    if (status.error_code() != grpc::StatusCode::INVALID_ARGUMENT) return Fail(status);
    std::cout << "error:  INVALID_ARGUMENT - " << status.error_message() << "\n";
  }
}
