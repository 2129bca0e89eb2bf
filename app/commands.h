#pragma once

// Each command adds itself to the command line with a callback that does the work. A command reports a failed check
// through `exit_code`; everything else throws furlong::Error.

#include <CLI/CLI.hpp>

namespace furlong::app {

using AddCommand = void (*)(CLI::App& app, int& exit_code);

void add_compare(CLI::App& app, int& exit_code);
void add_convert(CLI::App& app, int& exit_code);
void add_data(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_generate(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_logits(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_report(CLI::App& app, int& exit_code);
void add_tokenizer(CLI::App& app, int& exit_code);
void add_train(CLI::App& app, int& exit_code);
void add_version(CLI::App& app, int& exit_code);

constexpr AddCommand kCommands[] = {
    add_tokenizer, add_data,    add_train,  add_eval, add_generate, add_report,  add_inspect,
    add_convert,   add_compare, add_logits, add_plan, add_doctor,   add_version,
};

}  // namespace furlong::app
