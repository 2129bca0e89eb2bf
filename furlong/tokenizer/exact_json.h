#pragma once

// JSON as a prompt needs it: what was written comes back byte for byte. Keys keep their order, integers of any size
// keep their digits, and text is laid out as the published renderers (Python's json.dumps) lay it out.

#include <string>
#include <string_view>

#include "furlong/base/json.h"

namespace furlong {

/// Deeper nesting than this is refused.
constexpr int kMaxJsonDepth = 200;

/// FormatError names `where` and the position. An integer beyond 64 bits becomes a binary value of its digits.
OrderedJson parse_exact_json(std::string_view text, const std::string& where);

enum class JsonStyle {
  kCompact,        // {"b":[1,2],"a":0}
  kCompactSorted,  // {"a":0,"b":[1,2]}, at every depth
  kSpaced,         // {"b": [1, 2], "a": 0}
};

/// Non-ASCII text stays as it is. Needs a value of parse_exact_json.
std::string exact_json_text(const OrderedJson& value, JsonStyle style);

/// Whether the value is a number, integers beyond 64 bits included.
inline bool is_exact_number(const OrderedJson& value) {
  return value.is_number() || value.is_binary();
}

}  // namespace furlong
