// `zeroshard health`, for probes of container engines.
#pragma once

#include "client/command.h"

namespace zeroshard {

void AddHealthCommand(CLI::App* app, CommandContext* context);

}  // namespace zeroshard
