// kubernetes_policy [--rules FOLDER] FILE...: what must hold of rendered manifests beyond their
// schemas; with --rules, that their PrometheusRules are the rule files of that folder. Prints each
// breach as a line; exit code 1 if there is any, 2 where a file cannot be read.
#include <cstdio>
#include <exception>
#include <string>

#include "tests/deploy/kubernetes/objects.h"

int main(int argc, char** argv) {
  using namespace zeroshard::kubernetes;
  int breaches = 0;
  const bool rules = argc > 2 && std::string(argv[1]) == "--rules";
  for (int i = rules ? 3 : 1; i < argc; ++i) {
    const std::string file = argv[i];
    const Complain complain = [&](const std::string& object, const std::string& what) {
      std::printf("%s: %s: %s\n", file.c_str(), object.c_str(), what.c_str());
      ++breaches;
    };
    try {
      const Objects objects(file);
      CheckPods(objects, complain);
      CheckNetwork(objects, complain);
      CheckExtensions(objects, complain);
      if (rules) CheckRules(objects, argv[2], complain);
    } catch (const std::exception& error) {
      std::printf("%s: %s\n", file.c_str(), error.what());
      return 2;
    }
  }
  return breaches == 0 ? 0 : 1;
}
