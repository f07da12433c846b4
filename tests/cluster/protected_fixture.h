// A cluster of daemons that the test starts itself, each with a certificate of its own.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cluster/local_fixture.h"
#include "tests/common/security/certificates.h"

namespace zeroshard::cluster {

// Its folder is WORKDIR "w", so that History("w") and AddressOf("w", ...) tell of it.
class ProtectedTest : public LocalTest {
 protected:
  ProtectedTest();

  // The pair NAME.crt, NAME.key, for a role or for one name in it: "worker/worker-0".
  void Issue(const security::TestAuthority& authority, const std::string& name,
             const std::string& role);
  std::vector<std::string> TlsOptions(const std::string& name) const;

  std::string Program(const std::string& name) const;
  // With free ports of 127.0.0.1, and for the members with the coordinator's address.
  Process* Start(const std::string& name, const std::string& program,
                 const std::vector<std::string>& more = {});
  // A coordinator, two workers and a store with certificates of `authority_`, which are all
  // members.
  void StartCluster();
  // A job that trains until it is cancelled, its state in the store; returns once it does.
  void SubmitEndless();
  // The client with its certificate.
  std::unique_ptr<Process> Client(std::vector<std::string> args);
  nlohmann::ordered_json Status();
  // Of a daemon's metrics page; -1: not there.
  double Metric(const std::string& daemon, const std::string& series);
  // That the job does so many steps more.
  bool GoesOn(size_t steps);

  security::TestAuthority authority_{"one"};
  std::string ca_;
  std::map<std::string, std::unique_ptr<Process>> daemons_;
};

}  // namespace zeroshard::cluster
