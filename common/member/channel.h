// gRPC channels as members open them to the coordinator.
#pragma once

#include <memory>
#include <string>

#include "grpcpp/channel.h"

namespace zeroshard {

// A channel with a connection of its own (channels to one address would share one otherwise), so
// that heartbeats never queue behind anything else. It connects again within about two seconds of
// the coordinator's return, notices a cut link by pings while a call is open, and ignores
// http_proxy: the cluster is never reached through one. It is protected as the process's security
// says; then only a coordinator's certificate is accepted.
std::shared_ptr<grpc::Channel> MakeMemberChannel(const std::string& address);

}  // namespace zeroshard
