#pragma once

// Exceptions that end a command. Each carries the exit code of the program; the message names the thing (op, file,
// key), what came and what was needed. Conditions that a correct program meets in normal service are values, see
// result.h.

#include <stdexcept>
#include <string>

namespace furlong {

class Error : public std::runtime_error {
 public:
  Error(const std::string& message, int exit_code) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// A wrong argument, option or shape: the caller's mistake.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(message, 2) {}
};

/// A config file with an unknown key, a wrong type or a value out of range.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message) : Error(message, 2) {}
};

/// A file whose content is not what it claims to be: truncated, corrupted, of another format.
class FormatError : public Error {
 public:
  explicit FormatError(const std::string& message) : Error(message, 2) {}
};

/// The machine said no: a missing or unreadable file, a full disk, a folder that cannot be written.
class IoError : public Error {
 public:
  explicit IoError(const std::string& message) : Error(message, 1) {}
};

/// A computation gave NaN or infinity where it must not. The trainer skips the step and records it.
class NumericError : public Error {
 public:
  explicit NumericError(const std::string& message) : Error(message, 1) {}
};

}  // namespace furlong
