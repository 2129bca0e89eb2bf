#include "app/failure.h"

#include <c10/util/Exception.h>

#include <new>
#include <vector>

#include "furlong/base/config.h"

namespace furlong::app {

namespace {

/// The command that the arguments reached, as deep as they go.
const CLI::App* reached(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return command;
}

std::string path_of(const CLI::App* command) {
  std::string path = command->get_name();
  for (const CLI::App* parent = command->get_parent(); parent != nullptr; parent = parent->get_parent()) {
    path = parent->get_name() + " " + path;
  }
  return path;
}

/// A word where a command of a group is due.
std::string unknown_command(const CLI::App* group) {
  std::vector<std::string> names;
  for (const CLI::App* command : group->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  for (const std::string& word : group->remaining()) {
    if (word.starts_with("-")) continue;
    const std::string close = closest_word(word, names);
    return "unknown command '" + word + "'" +
           (close.empty() ? "; need one of: " + list : " (did you mean '" + close + "'?)");
  }
  return "a command is required, one of: " + list;
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::string command_line_fault(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = reached(app);
  const std::string path = path_of(command);
  const bool group = !command->get_subcommands([](const CLI::App*) { return true; }).empty();
  const std::string fault = group ? unknown_command(command) : first_line(error.what());
  // The program's own name stands in front of every message already.
  const std::string where = command == &app ? "" : path.substr(path.find(' ') + 1) + ": ";
  return where + fault + "; see " + path + " --help";
}

std::string foreign_fault(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "out of memory";
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return first_line(torch != nullptr ? torch->what_without_backtrace() : error.what());
}

}  // namespace furlong::app
