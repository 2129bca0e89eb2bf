// furlong: trains, evaluates and runs hybrid long-context models. One file a command; no logic here.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "app/commands.h"
#include "app/failure.h"
#include "furlong/base/error.h"

namespace {

/// GCC's OpenMP runtime lets a waiting thread spin for milliseconds before it sleeps. A short spin is faster (demo
/// training on two quiet cores: 6,020 tokens/s, against 5,160 with the default of 300,000 and 4,080 with none at all).
/// The runtime reads its settings when it is loaded, so the program starts itself again, unless the user has chosen.
/// Beside busy processes OMP_WAIT_POLICY=passive is the choice: a spinning thread takes the time of the one it waits
/// for.
void bound_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  execv("/proc/self/exe", argv);  // returns only if it could not: then the default serves
}

}  // namespace

int main(int argc, char** argv) {
  bound_spinning(argv);
  CLI::App app("Furlong trains, evaluates and runs long-context hybrid models.", "furlong");
  app.require_subcommand(1);
  app.set_version_flag("--version", FURLONG_VERSION);
  app.get_formatter()->column_width(36);
  int exit_code = 0;
  for (const auto add : furlong::app::kCommands) add(app, exit_code);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "furlong: %s\n", furlong::app::command_line_fault(app, error).c_str());
    return 2;
  } catch (const furlong::Error& error) {
    std::fprintf(stderr, "furlong: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "furlong: %s\n", furlong::app::foreign_fault(error).c_str());
    return 1;
  }
}
