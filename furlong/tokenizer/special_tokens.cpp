#include "furlong/tokenizer/special_tokens.h"

#include <algorithm>
#include <charconv>
#include <functional>

#include "furlong/base/error.h"
#include "furlong/base/json.h"

namespace furlong {

namespace {

// More reserved ids than this is a damaged file, not a vocabulary.
constexpr int64_t kMaxReservedIds = 1 << 20;

const std::vector<std::string> kFirstNames = {"[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"};
const std::vector<std::string> kLastNames = {"[UNK]", "[PAD]"};

int64_t parse_id(const std::string& key, int64_t first_id, const std::string& where) {
  int64_t id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (error != std::errc() || end != key.data() + key.size()) {
    throw FormatError(where + ": added_tokens_decoder: '" + key + "' is not a token id");
  }
  if (id < first_id || id >= first_id + kMaxReservedIds) {
    throw FormatError(where + ": added_tokens_decoder: id " + key + " is outside the reserved ids, which start at " +
                      std::to_string(first_id));
  }
  return id;
}

}  // namespace

SpecialTokens::SpecialTokens(int64_t first_id, const std::vector<std::string>& names)
    : first_id_(first_id), names_(names) {
  for (int64_t i = 0; i < count(); ++i) {
    if (names_[i].empty()) names_[i] = "<|reserved_token_" + std::to_string(first_id + i) + "|>";
    if (!ids_.emplace(names_[i], first_id + i).second) {
      throw UsageError("[special_tokens] names: got '" + names_[i] + "' twice, need different names");
    }
    std::vector<size_t>& lengths = lengths_by_first_[static_cast<unsigned char>(names_[i].front())];
    const auto place = std::lower_bound(lengths.begin(), lengths.end(), names_[i].size(), std::greater<>());
    if (place == lengths.end() || *place != names_[i].size()) lengths.insert(place, names_[i].size());
  }
}

SpecialTokens SpecialTokens::from_json(std::string_view text, int64_t first_id, const std::string& where) {
  const Json config = parse_json(text, where);
  if (!config.is_object() || !config.contains("added_tokens_decoder") || !config["added_tokens_decoder"].is_object()) {
    throw FormatError(where + ": has no table 'added_tokens_decoder'");
  }
  std::vector<std::string> names;
  for (const auto& [key, entry] : config["added_tokens_decoder"].items()) {
    const int64_t id = parse_id(key, first_id, where);
    if (!entry.is_object() || !entry.contains("content") || !entry["content"].is_string() ||
        entry["content"].get_ref<const std::string&>().empty()) {
      throw FormatError(where + ": added_tokens_decoder: id " + key + " has no text 'content'");
    }
    names.resize(std::max<size_t>(names.size(), id - first_id + 1));
    names[id - first_id] = entry["content"].get<std::string>();
  }
  // A table with gaps is a published one: it names the ids in use, of a block of a fixed size.
  const bool has_gaps = std::count(names.begin(), names.end(), std::string()) > 0;
  if (has_gaps) names.resize(std::max<size_t>(names.size(), kReleasedReservedIds));
  try {
    return SpecialTokens(first_id, names);
  } catch (const UsageError& error) {
    throw FormatError(where + ": " + error.what());
  }
}

SpecialTokens SpecialTokens::standard(int64_t first_id, int64_t count) {
  const auto named = static_cast<int64_t>(kFirstNames.size() + kLastNames.size());
  if (count < named || count > kMaxReservedIds) {
    throw UsageError("[special_tokens] reserved: got " + std::to_string(count) + ", need " + std::to_string(named) +
                     " to " + std::to_string(kMaxReservedIds));
  }
  std::vector<std::string> names(count);
  std::copy(kFirstNames.begin(), kFirstNames.end(), names.begin());
  std::copy(kLastNames.begin(), kLastNames.end(), names.end() - static_cast<int64_t>(kLastNames.size()));
  return SpecialTokens(first_id, names);
}

std::optional<int64_t> SpecialTokens::find(std::string_view name) const {
  const auto found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<int64_t> SpecialTokens::match(std::string_view text, size_t at) const {
  for (const size_t length : lengths_by_first_[static_cast<unsigned char>(text[at])]) {
    if (length > text.size() - at) continue;
    if (const auto id = find(text.substr(at, length))) return id;
  }
  return std::nullopt;
}

std::string SpecialTokens::to_json() const {
  OrderedJson decoder = OrderedJson::object();
  for (int64_t id = first_id_; id < first_id_ + count(); ++id) {
    decoder[std::to_string(id)] = {{"content", name(id)}, {"lstrip", false},      {"normalized", false},
                                   {"rstrip", false},     {"single_word", false}, {"special", true}};
  }
  OrderedJson config = {{"added_tokens_decoder", decoder}};
  for (const auto& [key, token] : {std::pair{"bos_token", "[BOS]"}, std::pair{"eos_token", "[EOS]"},
                                   std::pair{"pad_token", "[PAD]"}, std::pair{"unk_token", "[UNK]"}}) {
    if (find(token)) config[key] = token;
  }
  config["clean_up_tokenization_spaces"] = false;
  config["tokenizer_class"] = "TikTokenTokenizer";
  return config.dump(1) + "\n";
}

}  // namespace furlong
