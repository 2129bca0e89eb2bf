// furlong: trains, evaluates and runs hybrid long-context models. One file a command; no logic here.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "app/commands.h"
#include "furlong/base/error.h"

int main(int argc, char** argv) {
  CLI::App app("Furlong trains, evaluates and serves long-context hybrid models.", "furlong");
  app.require_subcommand(1);
  app.set_version_flag("--version", FURLONG_VERSION);
  app.get_formatter()->column_width(36);
  int exit_code = 0;
  for (const auto add : furlong::app::kCommands) add(app, exit_code);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : (app.exit(error), 2);
  } catch (const furlong::Error& error) {
    std::fprintf(stderr, "furlong: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "furlong: %s\n", error.what());
    return 1;
  }
}
