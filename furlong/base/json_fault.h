#pragma once

#include <string>

#include "furlong/base/json.h"

namespace furlong {

/// What the parser says, without the library's own name in front: "parse error at line 1, column 2: ...".
std::string json_fault(const Json::exception& error);

}  // namespace furlong
