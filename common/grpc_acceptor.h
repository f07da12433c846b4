// From a listener of ours to a gRPC server that was built with AddExternalConnectionAcceptor.
#pragma once

#include <memory>
#include <utility>

#include "common/security/listener.h"
#include "grpcpp/server_builder.h"

namespace zeroshard {

inline security::Listener::Take HandTo(
    std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  return [acceptor = std::move(acceptor)](int listening, int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listening;
    connection.fd = fd;
    acceptor->HandleNewConnection(&connection);
  };
}

}  // namespace zeroshard
