// Every method that exists has a rule, and every rule a method.
#include "common/security/rpc_roles.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/security/authoriser.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/jobs.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::security {
namespace {

using ::testing::HasSubstr;

std::set<std::string> MethodsOfAllProtoFiles() {
  // What is linked can be looked up.
  v1::Hello::descriptor();
  v1::JobSpec::descriptor();
  v1::JobStatus::descriptor();
  v1::BulkHello::descriptor();
  const std::string folder = ZEROSHARD_PROTO_FOLDER;
  std::set<std::string> methods;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".proto") continue;
    const std::string name = std::filesystem::relative(entry.path(), folder).string();
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(name);
    if (file == nullptr) {
      ADD_FAILURE() << name << " is not linked here: include its header in this test";
      continue;
    }
    for (int i = 0; i < file->service_count(); ++i) {
      const auto* service = file->service(i);
      for (int j = 0; j < service->method_count(); ++j) {
        methods.insert(absl::StrCat("/", service->full_name(), "/", service->method(j)->name()));
      }
    }
  }
  return methods;
}

TEST(RpcRoles, EveryMethodHasARuleAndEveryRuleAMethod) {
  const std::set<std::string> methods = MethodsOfAllProtoFiles();
  EXPECT_GE(methods.size(), 19u);
  for (const std::string& method : methods) {
    const RpcRule* rule = FindRule(method);
    ASSERT_NE(rule, nullptr) << method << " may be called by nobody: add it to rpc_roles.cc";
    EXPECT_FALSE(rule->roles.empty()) << method;
  }
  std::set<std::string> seen;
  for (const RpcRule& rule : RpcRules()) {
    EXPECT_TRUE(seen.insert(std::string(rule.method)).second) << rule.method << " is there twice";
    if (absl::StartsWith(rule.method, "/grpc.")) continue;
    EXPECT_TRUE(methods.contains(std::string(rule.method))) << rule.method << " does not exist";
  }
}

TEST(RpcRoles, NoRoleDoesAnothersWork) {
  for (const RpcRule& rule : RpcRules()) {
    for (const Role role : kAllRoles) {
      const bool may = MayCall(Identity::FromUris({UriOf(role)}), rule.method).ok();
      // Said apart from the table: jobs are the clients', keys and barriers the workers', bulk data
      // and sessions the members'.
      bool wanted = false;
      if (absl::StartsWith(rule.method, "/zeroshard.v1.Jobs/") ||
          absl::EndsWith(rule.method, "/ReportExit") ||
          absl::EndsWith(rule.method, "/ServerReflectionInfo")) {
        wanted = role == Role::kClient;
      } else if (absl::EndsWith(rule.method, "/Session") ||
                 absl::StartsWith(rule.method, "/zeroshard.v1.ShardStore/")) {
        wanted = role == Role::kWorker || role == Role::kStore;
      } else if (absl::StartsWith(rule.method, "/zeroshard.v1.Cluster/")) {
        wanted = role == Role::kWorker;
      } else {
        wanted = absl::StartsWith(rule.method, "/grpc.health.v1.Health/");
      }
      EXPECT_EQ(may, wanted) << NameOf(role) << " " << rule.method;
    }
  }
}

TEST(RpcRoles, WhatIsUnknownIsRefused) {
  const Identity client = Identity::FromUris({UriOf(Role::kClient)});
  const absl::Status unknown = MayCall(client, "/zeroshard.v1.Jobs/Destroy");
  EXPECT_EQ(unknown.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("no role may call it"));
  EXPECT_EQ(MayCall(client, "").code(), absl::StatusCode::kPermissionDenied);
  const absl::Status nobody = MayCall(Identity(), "/zeroshard.v1.Jobs/List");
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("spiffe://zeroshard/client"));
  const absl::Status long_one = MayCall(client, std::string(1000000, '/'));
  EXPECT_LT(long_one.message().size(), 400u) << "a message travels in headers of 8 KiB";
}

TEST(Identity, IsWhatTheUrisSay) {
  const Identity named = Identity::FromUris(
      {"spiffe://zeroshard/worker/worker-0", "spiffe://zeroshard/store", "https://zeroshard/client",
       "spiffe://other/client", "spiffe://zeroshard/clients", "spiffe://zeroshard/client/", ""});
  EXPECT_TRUE(named.Has(Role::kWorker));
  EXPECT_TRUE(named.Has(Role::kStore));
  EXPECT_FALSE(named.Has(Role::kClient));
  EXPECT_FALSE(named.Has(Role::kCoordinator));
  EXPECT_TRUE(named.MayBe(Role::kWorker, "worker-0"));
  EXPECT_FALSE(named.MayBe(Role::kWorker, "worker-1"));
  EXPECT_TRUE(named.MayBe(Role::kStore, "store-7"));
  EXPECT_FALSE(named.MayBe(Role::kClient, ""));
  EXPECT_EQ(named.Describe(), "worker (worker-0), store");
  EXPECT_TRUE(Identity::FromUris({"spiffe://zeroshard/worker/a", "spiffe://zeroshard/worker"})
                  .MayBe(Role::kWorker, "b"));
  EXPECT_EQ(Identity().Describe(), "no role");
}

}  // namespace
}  // namespace zeroshard::security
