#include "common/spec/yaml_documents.h"

#include <yaml-cpp/eventhandler.h>

#include <sstream>

namespace zeroshard {
namespace {

// Keeps where the document begins, and nothing of its content.
class Beginning : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override { mark_ = mark; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

  const YAML::Mark& mark() const { return mark_; }

 private:
  YAML::Mark mark_;
};

}  // namespace

YamlDocuments LoadYaml(const std::string& text) {
  YamlDocuments documents;
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Beginning first, second;
  if (!parser.HandleNextDocument(first)) return documents;
  if (parser.HandleNextDocument(second)) documents.second = second.mark();
  documents.first = YAML::Load(text);
  return documents;
}

}  // namespace zeroshard
