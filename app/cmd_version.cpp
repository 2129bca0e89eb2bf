#include <cstdio>

#include "app/commands.h"

namespace furlong::app {

void add_version(CLI::App& app, int&) {
  auto* command = app.add_subcommand("version", "Print the version of this build");
  command->callback([] { std::printf("furlong %s\n", FURLONG_VERSION); });
}

}  // namespace furlong::app
