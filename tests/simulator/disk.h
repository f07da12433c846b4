// The checkpoint folders that everybody reaches, and the coordinator's history files: they outlive
// every process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zeroshard/v1/store.pb.h"

namespace zeroshard::simulator {

struct Folder {
  bool complete = false;
  uint64_t step = 0;
  std::map<uint32_t, uint64_t> chunks;  // their state, by number
  std::map<std::string, std::map<uint32_t, uint64_t>> files;
};

struct Disk {
  std::map<std::string, Folder> folders;                         // by path
  std::map<std::string, std::vector<v1::StepRecord>> histories;  // by run
};

}  // namespace zeroshard::simulator
