#pragma once

// Messages of the program to standard error. Libraries hand facts up as values; what is worth saying once (a fast path
// not taken, an option that has no effect) goes through say_once.

#include <string>

namespace furlong {

/// Prints one line to standard error.
void say(const std::string& line);
/// Prints a line the first time this exact text is given, nothing afterwards.
void say_once(const std::string& line);
/// True when standard error is a terminal (progress bars are drawn only there).
bool stderr_is_terminal();

}  // namespace furlong
