#include "common/security/rpc_roles.h"

#include <algorithm>

namespace zeroshard::security {

absl::Span<const RpcRule> RpcRules() {
  using enum Role;
  static const std::vector<RpcRule>* const rules = new std::vector<RpcRule>{
      {"/zeroshard.v1.Cluster/Session", {kWorker, kStore}},
      {"/zeroshard.v1.Cluster/PutKey", {kWorker}},
      {"/zeroshard.v1.Cluster/GetKey", {kWorker}},
      {"/zeroshard.v1.Cluster/Barrier", {kWorker}},
      {"/zeroshard.v1.Cluster/ReportSteps", {kWorker}},
      {"/zeroshard.v1.Cluster/CommitStep", {kWorker}},
      {"/zeroshard.v1.Cluster/ReportEnd", {kWorker}},
      // From a supervisor, which is a client.
      {"/zeroshard.v1.Cluster/ReportExit", {kClient}},
      {"/zeroshard.v1.Jobs/Submit", {kClient}},
      {"/zeroshard.v1.Jobs/List", {kClient}},
      {"/zeroshard.v1.Jobs/Get", {kClient}},
      {"/zeroshard.v1.Jobs/Cancel", {kClient}},
      {"/zeroshard.v1.Jobs/Watch", {kClient}},
      {"/zeroshard.v1.Jobs/History", {kClient}},
      {"/zeroshard.v1.Jobs/Logs", {kClient}},
      {"/zeroshard.v1.Jobs/Nodes", {kClient}},
      {"/zeroshard.v1.Jobs/Version", {kClient}},
      {"/zeroshard.v1.Jobs/Checkpoints", {kClient}},
      // Stores read from each other.
      {"/zeroshard.v1.ShardStore/Bulk", {kWorker, kStore}},
      {"/grpc.health.v1.Health/Check", {kClient, kWorker, kStore, kCoordinator}},
      {"/grpc.health.v1.Health/Watch", {kClient, kWorker, kStore, kCoordinator}},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {kClient}},
  };
  return *rules;
}

const RpcRule* FindRule(absl::string_view method) {
  const absl::Span<const RpcRule> rules = RpcRules();
  const auto found = std::find_if(rules.begin(), rules.end(),
                                  [method](const RpcRule& rule) { return rule.method == method; });
  return found == rules.end() ? nullptr : &*found;
}

}  // namespace zeroshard::security
