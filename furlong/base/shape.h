#pragma once

// Checks of tensor arguments. Each throws UsageError naming op, argument, what came and what was needed:
//   [kda_chunk] beta_NH: got [8, 3], need [8, 4]

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <sstream>
#include <string>

#include "furlong/base/error.h"

namespace furlong {

inline std::string shape_text(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i > 0 ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

/// A negative entry of `need` stands for any size.
inline void check_shape(const char* op, const char* argument, const at::Tensor& tensor,
                        std::initializer_list<int64_t> need) {
  bool fits = tensor.defined() && tensor.dim() == static_cast<int64_t>(need.size());
  for (int64_t i = 0; fits && i < tensor.dim(); ++i) {
    const int64_t size = need.begin()[i];
    fits = size < 0 || tensor.size(i) == size;
  }
  if (fits) return;
  throw UsageError(std::string("[") + op + "] " + argument + ": got " +
                   (tensor.defined() ? shape_text(tensor.sizes()) : "no tensor") + ", need " +
                   shape_text(at::IntArrayRef(need.begin(), need.size())));
}

inline void check_dtype(const char* op, const char* argument, const at::Tensor& tensor, at::ScalarType need) {
  if (tensor.scalar_type() == need) return;
  throw UsageError(std::string("[") + op + "] " + argument + ": got " + c10::toString(tensor.scalar_type()) +
                   ", need " + c10::toString(need));
}

/// For conditions that the two checks above cannot say.
inline void check_argument(bool condition, const char* op, const std::string& message) {
  if (!condition) throw UsageError(std::string("[") + op + "] " + message);
}

}  // namespace furlong
