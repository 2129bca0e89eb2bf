#include "furlong/tokenizer/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>
#include <string>

#include "furlong/base/error.h"
#include "furlong/tokenizer/utf8.h"

namespace furlong {

namespace {

// PCRE2 has no set intersection. General categories partition the code points, so "(Lu, Lt, Lm, Lo or M) and not Han"
// is the complement of "any other category, or Han". Script is sc, not scx (what \p{Han} means to PCRE2 >= 10.40).
// \s is written out as Unicode's White_Space: PCRE2's own \s is ASCII, or with UCP holds U+180E as well.
#define FURLONG_UPPER "[^\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"
#define FURLONG_LOWER "[^\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{sc:Han}]"
#define FURLONG_SPACES "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define FURLONG_CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
constexpr std::string_view kPattern =
    "[\\p{sc:Han}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?" FURLONG_UPPER "*" FURLONG_LOWER "+" FURLONG_CONTRACTION
    "|[^\\r\\n\\p{L}\\p{N}]?" FURLONG_UPPER "+" FURLONG_LOWER "*" FURLONG_CONTRACTION
    "|\\p{N}{1,3}"
    "| ?[^" FURLONG_SPACES
    "\\p{L}\\p{N}]+[\\r\\n]*"
    "|[" FURLONG_SPACES
    "]*[\\r\\n]+"
    "|[" FURLONG_SPACES "]+(?![^" FURLONG_SPACES
    "])"
    "|[" FURLONG_SPACES "]+";
#undef FURLONG_UPPER
#undef FURLONG_LOWER
#undef FURLONG_SPACES
#undef FURLONG_CONTRACTION

std::string pcre2_message(int code) {
  PCRE2_UCHAR buffer[128];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

const pcre2_code* pattern() {
  static const pcre2_code* const code = [] {
    int error = 0;
    size_t offset = 0;
    // Anchored here and not at the match: as an option of the match it would switch the compiled code off.
    pcre2_code* compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern.data()), kPattern.size(),
                                         PCRE2_UTF | PCRE2_ANCHORED, &error, &offset, nullptr);
    if (compiled == nullptr) {
      throw Error("[tokenizer] PCRE2 refuses the pattern at " + std::to_string(offset) + ": " + pcre2_message(error),
                  1);
    }
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);  // without JIT support the interpreter gives the same matches
    return compiled;
  }();
  return code;
}

/// Matches pieces of well-formed text, reusing PCRE2's buffers.
class Matcher {
 public:
  Matcher() : match_(pcre2_match_data_create_from_pattern(pattern(), nullptr)) {
    if (!match_) throw std::bad_alloc();
  }

  void split(std::string_view text, const std::function<void(std::string_view)>& piece) {
    for (size_t at = 0; at < text.size();) {
      const int found = pcre2_match(pattern(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                    PCRE2_NO_UTF_CHECK, match_.get(), nullptr);
      if (found < 0) {
        // Every character belongs to some alternative, so no match means that a resource ran out.
        throw Error("[tokenizer] pre-split failed: " + pcre2_message(found), 1);
      }
      const size_t end = pcre2_get_ovector_pointer(match_.get())[1];
      piece(text.substr(at, end - at));
      at = end;
    }
  }

 private:
  struct Free {
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  std::unique_ptr<pcre2_match_data, Free> match_;
};

/// Python's str.isspace, by which the published tokenizer measures runs: White_Space and U+001C..U+001F.
bool is_space(char32_t c) {
  if (c <= 0x20) return c == 0x20 || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f);
  if (c < 0x1680) return c == 0x85 || c == 0xa0;
  return c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

/// Tells after which characters the two length rules cut.
class LengthRules {
 public:
  /// True when the text must be cut before a character of this kind.
  bool cut_before(bool space) {
    if (characters_ == kMaxPieceCharacters) {
      characters_ = run_ = 0;
      return advance(space), true;
    }
    return advance(space);
  }

 private:
  bool advance(bool space) {
    ++characters_;
    if (run_ == 0 || space != run_is_space_) {
      run_is_space_ = space;
      run_ = 1;
      return false;
    }
    if (++run_ <= kMaxRunCharacters) return false;
    run_ = 1;
    return true;
  }

  size_t characters_ = 0;
  size_t run_ = 0;
  bool run_is_space_ = false;
};

}  // namespace

void pretokenize(std::string_view text, const std::function<void(std::string_view)>& piece) {
  Matcher matcher;
  LengthRules rules;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    const bool space = length > 0 && is_space(utf8_value(text, at, length));
    const bool cut = rules.cut_before(space);
    if (cut || length == 0) {
      matcher.split(text.substr(begin, at - begin), piece);
      begin = at;
    }
    if (length == 0) {
      piece(text.substr(at, 1));
      begin = ++at;
    } else {
      at += length;
    }
  }
  matcher.split(text.substr(begin), piece);
}

}  // namespace furlong
