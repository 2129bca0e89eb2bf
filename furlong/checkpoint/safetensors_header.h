#pragma once

// The JSON header of a safetensors file, parsed event by event: what does not fit the format's three levels is refused
// where it stands, so a hostile header costs no more memory than the entries it spells out.

#include <map>
#include <string>
#include <string_view>

#include "furlong/checkpoint/safetensors.h"

namespace furlong {

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;  // offsets from the start of the data section
  std::map<std::string, std::string> metadata;
};

/// FormatError names `file`, the tensor and what is wrong. The data section is `data_bytes` long; the tensors must
/// cover it without overlap or gap.
SafetensorsHeader parse_safetensors_header(std::string_view text, uint64_t data_bytes, const std::string& file);

/// The bytes of a tensor, or nothing where the product does not fit a signed 64-bit integer. Sizes of zero count as one
/// while looking for overflow, since strides are computed that way.
bool safetensors_bytes(const std::vector<int64_t>& shape, int64_t dtype_bytes, uint64_t* bytes);

}  // namespace furlong
