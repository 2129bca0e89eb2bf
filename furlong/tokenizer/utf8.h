#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace furlong {

/// Length of the well-formed UTF-8 character at text[at], or 0 when there is none (stray, truncated, overlong,
/// surrogate or beyond U+10FFFF).
size_t utf8_length(std::string_view text, size_t at);

/// The code point of a well-formed character of `length` bytes at text[at].
char32_t utf8_value(std::string_view text, size_t at, size_t length);

/// Bytes at the end of `text` that begin a character which is not complete yet: 0 to 3. Text cut before them is
/// replaced piece by piece as it would be whole.
size_t incomplete_utf8_tail(std::string_view text);

/// Each maximal ill-formed part becomes one U+FFFD (Unicode 3.9, "substitution of maximal subparts"), as Python's
/// "replace" does it.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace furlong
