#pragma once

// Trains a byte-level BPE vocabulary: the most frequent pair of neighbouring tokens becomes a token, again and again.
// Deterministic: the result depends on the multiset of pre-tokens alone, ties go to the pair of lowest ranks.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace furlong {

class TokenizerTrainer {
 public:
  /// Counts the pre-tokens of a document.
  void add(std::string_view text);
  int64_t num_bytes() const { return num_bytes_; }

  /// At most `num_ranks` tokens by rank, the 256 bytes first. Fewer when no pair occurs twice any more: a token seen
  /// once teaches nothing. UsageError when num_ranks < 256.
  std::vector<std::string> train(int64_t num_ranks) const;

 private:
  std::unordered_map<std::string, int64_t> counts_;
  int64_t num_bytes_ = 0;
};

/// The text of a tiktoken rank file.
std::string rank_file_text(const std::vector<std::string>& tokens);

}  // namespace furlong
