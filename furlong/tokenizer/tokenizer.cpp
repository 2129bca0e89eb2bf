#include "furlong/tokenizer/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/sha256.h"
#include "furlong/tokenizer/base64.h"
#include "furlong/tokenizer/bpe.h"
#include "furlong/tokenizer/pretokenize.h"
#include "furlong/tokenizer/special_tokens.h"

namespace furlong {

namespace fs = std::filesystem;

struct Tokenizer::Impl {
  RankTable ranks;
  SpecialTokens special;
  std::string sha256;
  std::string name;  // of the rank file, for messages
};

namespace {

/// One line "base64 SP rank"; ranks count up from 0.
void add_line(RankTable& ranks, std::string_view line, const std::string& where) {
  const size_t space = line.find(' ');
  if (space == std::string_view::npos) throw FormatError(where + ": need 'base64 rank', got no space");
  const auto bytes = base64_decode(line.substr(0, space));
  if (!bytes || bytes->empty()) throw FormatError(where + ": the token is not base64");
  int64_t rank = -1;
  const std::string_view number = line.substr(space + 1);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (error != std::errc() || end != number.data() + number.size())
    throw FormatError(where + ": the rank is no number");
  if (rank != ranks.size()) {
    throw FormatError(where + ": got rank " + std::to_string(rank) + ", need " + std::to_string(ranks.size()));
  }
  if (!ranks.add(*bytes)) throw FormatError(where + ": the token was there before");
}

RankTable parse_ranks(std::string_view text, const std::string& name) {
  RankTable ranks;
  int64_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (!line.empty()) add_line(ranks, line, name + ":" + std::to_string(number));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char value = static_cast<char>(byte);
    if (ranks.find({&value, 1}) < 0) {
      throw FormatError(name + ": has no token for byte " + std::to_string(byte) + ", need all 256 single bytes");
    }
  }
  return ranks;
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::load(const fs::path& file_or_folder) {
  const fs::path file = fs::is_directory(file_or_folder) ? file_or_folder / "tiktoken.model" : file_or_folder;
  const fs::path config = file.parent_path() / "tokenizer_config.json";
  return from_text(read_file(file), file.string(), fs::exists(config) ? read_file(config) : std::string());
}

Tokenizer Tokenizer::from_text(std::string_view text, const std::string& name, std::string_view config) {
  RankTable ranks = parse_ranks(text, name);
  const int64_t first_id = ranks.size();
  const std::string config_name = (fs::path(name).parent_path() / "tokenizer_config.json").string();
  SpecialTokens special = config.empty() ? SpecialTokens::standard(first_id, kReleasedReservedIds)
                                         : SpecialTokens::from_json(config, first_id, config_name);
  return Tokenizer(std::make_unique<Impl>(Impl{std::move(ranks), std::move(special), sha256_hex(text), name}));
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int64_t> ids;
  ids.reserve(text.size() / 3);  // about what text takes
  pretokenize(text, [&](std::string_view piece) { bpe_encode(impl_->ranks, piece, ids); });
  return ids;
}

std::vector<int64_t> Tokenizer::encode_with_special(std::string_view text) const {
  std::vector<int64_t> ids;
  const auto append = [&](std::string_view ordinary) {
    pretokenize(ordinary, [&](std::string_view piece) { bpe_encode(impl_->ranks, piece, ids); });
  };
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const auto id = impl_->special.match(text, at);
    if (!id) {
      ++at;
      continue;
    }
    append(text.substr(begin, at - begin));
    ids.push_back(*id);
    begin = at += impl_->special.name(*id).size();
  }
  append(text.substr(begin));
  return ids;
}

EncodedSegments Tokenizer::encode_segments(const std::vector<TextSegment>& segments) const {
  EncodedSegments encoded;
  for (const TextSegment& segment : segments) {
    const auto ids = segment.special ? encode_with_special(segment.text) : encode(segment.text);
    encoded.ids.insert(encoded.ids.end(), ids.begin(), ids.end());
    encoded.trained.resize(encoded.ids.size(), segment.trained);
  }
  return encoded;
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) text += token_bytes(id);
  return text;
}

std::string Tokenizer::decode_ordinary(const std::vector<int64_t>& ids) const {
  std::string text;
  for (const int64_t id : ids) {
    const std::string_view bytes = token_bytes(id);  // refuses ids out of range, special ones too
    if (!is_special(id)) text += bytes;
  }
  return text;
}

std::string_view Tokenizer::token_bytes(int64_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw UsageError("[tokenizer] id: got " + std::to_string(id) + ", need 0 to " + std::to_string(vocab_size() - 1));
  }
  return id < impl_->ranks.size() ? impl_->ranks.bytes(id) : std::string_view(impl_->special.name(id));
}

int64_t Tokenizer::vocab_size() const {
  return impl_->ranks.size() + impl_->special.count();
}

int64_t Tokenizer::num_ranks() const {
  return impl_->ranks.size();
}

std::optional<int64_t> Tokenizer::special_id(std::string_view name) const {
  return impl_->special.find(name);
}

int64_t Tokenizer::end_of_document() const {
  const auto id = special_id("[EOS]");
  if (!id) throw FormatError(impl_->name + ": no special token is named [EOS], need one to end documents");
  return *id;
}

const std::string& Tokenizer::sha256() const {
  return impl_->sha256;
}

}  // namespace furlong
