#include "furlong/data/loader_state.h"

#include "furlong/base/error.h"

namespace furlong {

int64_t state_integer(const Json& values, const std::string& key, const std::string& where) {
  if (!values.is_object() || !values.contains(key) || !values[key].is_number_integer()) {
    throw FormatError(where + ": '" + key + "' is missing or no whole number");
  }
  return values[key].get<int64_t>();
}

Json cursor_to_json(const SourceCursor& cursor) {
  Json lanes = Json::array();
  for (const Lane& lane : cursor.lanes) lanes.push_back({lane.document, lane.next_token});
  return {{"epoch", cursor.epoch}, {"opened", cursor.opened}, {"rows", cursor.rows}, {"lanes", lanes}};
}

SourceCursor cursor_from_json(const Json& values, const std::string& where) {
  SourceCursor cursor;
  cursor.epoch = state_integer(values, "epoch", where);
  cursor.opened = state_integer(values, "opened", where);
  cursor.rows = state_integer(values, "rows", where);
  if (!values.contains("lanes") || !values["lanes"].is_array()) throw FormatError(where + ": 'lanes' is no array");
  for (const Json& lane : values["lanes"]) {
    if (!lane.is_array() || lane.size() != 2 || !lane[0].is_number_integer() || !lane[1].is_number_integer()) {
      throw FormatError(where + ": a lane must be [document, next token]");
    }
    cursor.lanes.push_back({lane[0].get<int64_t>(), lane[1].get<int64_t>()});
  }
  return cursor;
}

}  // namespace furlong
