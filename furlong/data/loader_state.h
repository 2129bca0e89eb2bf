#pragma once

// The cursor of one source as JSON, and back, checked.

#include <cstdint>
#include <string>
#include <vector>

#include "furlong/base/json.h"

namespace furlong {

/// An open document and the first token of it that no row has taken yet.
struct Lane {
  int64_t document = -1;  // none open
  int64_t next_token = 0;
};

struct SourceCursor {
  int64_t epoch = 0;
  int64_t opened = 0;  // documents of this epoch's order that were opened
  int64_t rows = 0;    // rows filled so far; row r belongs to lane r mod lanes
  std::vector<Lane> lanes;
};

Json cursor_to_json(const SourceCursor& cursor);
/// FormatError names `where` when something is missing or of the wrong type.
SourceCursor cursor_from_json(const Json& values, const std::string& where);

/// A whole number of a saved state. FormatError names `where` and the key.
int64_t state_integer(const Json& values, const std::string& key, const std::string& where);

}  // namespace furlong
