#pragma once

// Cuts text into pre-tokens: the pieces inside which byte pairs may merge. The rules are those of the Kimi tokenizers
// (README.md has the pattern); concatenated, the pieces are the text, whatever its bytes.

#include <cstddef>
#include <functional>
#include <string_view>

namespace furlong {

/// Text is first cut after this many characters, then wherever a run of whitespace, or of anything else, gets longer
/// than kMaxRun characters. Both rules are part of the tokenizer: ids depend on them.
constexpr size_t kMaxPieceCharacters = 400'000;
constexpr size_t kMaxRunCharacters = 25'000;

/// Calls `piece` with each pre-token, in order. Bytes that are no well-formed UTF-8 are pieces of their own, one each.
/// Safe to call from several threads.
void pretokenize(std::string_view text, const std::function<void(std::string_view)>& piece);

}  // namespace furlong
