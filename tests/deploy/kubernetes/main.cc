// kubernetes_policy FILE...: what must hold of rendered manifests beyond their schemas. Prints each
// breach as a line; exit code 1 if there is any, 2 where a file cannot be read.
#include <cstdio>
#include <string>

#include "tests/deploy/kubernetes/objects.h"

int main(int argc, char** argv) {
  using namespace zeroshard::kubernetes;
  int breaches = 0;
  for (int i = 1; i < argc; ++i) {
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
    } catch (const YAML::Exception& error) {
      std::printf("%s: %s\n", file.c_str(), error.what());
      return 2;
    }
  }
  return breaches == 0 ? 0 : 1;
}
