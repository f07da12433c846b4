// What a member tells the coordinator about the machine it runs on.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

std::string HostName();

// Bytes this process may use: the machine's memory or, where it is less, its control group's limit.
uint64_t MemoryLimitBytes();

// The host that others can use for a member that listens on `listen_host`: `advertised` where it is
// given, else `listen_host` unless that means "every address", else this host's name.
std::string AdvertisedHost(const std::string& advertised, const std::string& listen_host);

}  // namespace zeroshard
