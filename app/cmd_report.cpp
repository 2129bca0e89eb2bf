#include <cstdio>
#include <memory>
#include <string>

#include "app/commands.h"
#include "furlong/train/report/report.h"

namespace furlong::app {

void add_report(CLI::App& app, int&) {
  auto* command = app.add_subcommand("report", "Write a run as one self-contained HTML page");
  struct Options {
    std::string run, out;
  };
  auto options = std::make_shared<Options>();
  command->add_option("DIR", options->run, "Folder of the run")->required();
  command->add_option("--out", options->out, "File to write (default: DIR/report.html)");
  command->footer("Example:\n  furlong report out/demo/run --out out/demo/report.html");
  command->callback([options] {
    const std::string out = options->out.empty() ? options->run + "/report.html" : options->out;
    write_report(options->run, out);
    std::printf("%s\n", out.c_str());
  });
}

}  // namespace furlong::app
