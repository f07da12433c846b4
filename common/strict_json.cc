#include "common/strict_json.h"

#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

std::string Described(const nlohmann::json::exception& error) {
  absl::string_view text = error.what();
  const size_t name = text.find("] ");  // of the library's exception
  if (name != text.npos) text.remove_prefix(name + 2);
  return absl::StrCat("no JSON: ", OneLine(text, 200));
}

// Makes the tree out of what the reader meets. Every answer of false ends the reading.
template <typename Json>
class Builder : public nlohmann::json_sax<Json> {
 public:
  using typename nlohmann::json_sax<Json>::number_integer_t;
  using typename nlohmann::json_sax<Json>::number_unsigned_t;
  using typename nlohmann::json_sax<Json>::number_float_t;
  using typename nlohmann::json_sax<Json>::string_t;
  using typename nlohmann::json_sax<Json>::binary_t;

  bool null() override { return Add(nullptr) != nullptr; }
  bool boolean(bool value) override { return Add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return Add(value) != nullptr;
  }
  bool string(string_t& value) override { return Add(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return Fail("no JSON: a binary value"); }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool key(string_t& name) override {
    if (!open_.back().keys.insert(name).second) {
      return Fail(absl::StrCat("the key \"", OneLine(name), "\" is there twice"));
    }
    key_ = std::move(name);
    return true;
  }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_array() override { return Close(); }

  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    return Fail(Described(error));
  }

  const std::string& error() const { return error_; }
  Json root() { return std::move(root_); }

 private:
  struct Container {
    Json* value;
    std::unordered_set<std::string> keys;
  };

  bool Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return false;
  }

  // Where it now is. It stays there while it is open: its neighbours come after it is closed.
  template <typename Value>
  Json* Add(Value&& value) {
    if (open_.empty()) {
      root_ = std::forward<Value>(value);
      return &root_;
    }
    Json& parent = *open_.back().value;
    if (parent.is_array()) return &parent.emplace_back(std::forward<Value>(value));
    auto& object = parent.template get_ref<typename Json::object_t&>();
    if constexpr (std::is_same_v<Json, nlohmann::ordered_json>) {
      // That the key is new is known; the map would compare it with all others.
      static_cast<typename Json::object_t::Container&>(object).emplace_back(
          std::move(key_), std::forward<Value>(value));
      return &object.back().second;
    } else {
      return &object.emplace(std::move(key_), std::forward<Value>(value)).first->second;
    }
  }

  bool Open(Json container) {
    if (open_.size() == static_cast<size_t>(kMaxJsonDepth)) {
      return Fail(absl::StrCat("it is nested deeper than ", kMaxJsonDepth));
    }
    Json* added = Add(std::move(container));
    open_.push_back({added, {}});
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Container> open_;
  std::string key_;
  std::string error_;
};

}  // namespace

template <typename Json>
absl::StatusOr<Json> ParseStrictJson(absl::string_view text) {
  Builder<Json> builder;
  try {
    if (Json::sax_parse(text.begin(), text.end(), &builder)) return builder.root();
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(Described(error));
  }
  return absl::InvalidArgumentError(builder.error());
}

template absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text);
template absl::StatusOr<nlohmann::ordered_json> ParseStrictJson(absl::string_view text);

std::string OneLine(absl::string_view text, size_t longest) {
  std::string line(text.substr(0, longest));
  for (char& c : line) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return text.size() > longest ? line + "..." : line;
}

}  // namespace zeroshard
