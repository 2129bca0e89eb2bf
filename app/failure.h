#pragma once

// The one line on standard error that ends a command which cannot go on.

#include <CLI/CLI.hpp>
#include <exception>
#include <string>

namespace furlong::app {

/// What is wrong with the command line, which command it belongs to, and where its help is.
std::string command_line_fault(const CLI::App& app, const CLI::ParseError& error);

/// The message of an exception that is not Furlong's own: one line, without the stack trace that LibTorch adds.
std::string foreign_fault(const std::exception& error);

}  // namespace furlong::app
