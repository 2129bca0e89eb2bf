#pragma once

// Result<T>: a value or the reason why there is none, for outcomes that a correct program meets in normal service.

#include <string>
#include <utility>
#include <variant>

namespace furlong {

struct Failure {
  std::string reason;
};

template <typename T>
class Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Failure failure) : state_(std::move(failure)) {}

  explicit operator bool() const { return ok(); }
  bool ok() const { return std::holds_alternative<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  T& value() { return std::get<T>(state_); }
  const std::string& reason() const { return std::get<Failure>(state_).reason; }

 private:
  std::variant<T, Failure> state_;
};

}  // namespace furlong
