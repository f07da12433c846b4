// Counts the calls of a gRPC server by service, method and the code that they were answered with:
// zeroshard_grpc_server_started_total, ..._handled_total and, of unary methods,
// ..._handling_seconds.
#pragma once

#include <memory>

#include "grpcpp/server_builder.h"
#include "grpcpp/support/server_interceptor.h"
#include "prometheus/registry.h"

namespace zeroshard {

// Call it before BuildAndStart, and give what it returns to the builder (SetInterceptorCreators)
// before other interceptors, so that calls which these refuse are counted too. The series of every
// method of the builder's services, of health checks and of reflection are then there at 0; calls
// of methods that the server does not have count under service and method "unknown". Thread-safe
// afterwards. `registry` is kept.
//
// A call is handled, and its time over, when the server has forgotten it. Its code is what the
// server said, whether or not that arrived: a caller that hung up may have its call handled as OK.
// CANCELLED also where the call ended before the server said anything. A unary call whose message
// never comes whole, because it is larger than the server takes or the caller leaves before, is
// answered by gRPC alone: it never starts here.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CountCalls(
    grpc::ServerBuilder* builder, std::shared_ptr<prometheus::Registry> registry);

}  // namespace zeroshard
