#include "app/corpus_options.h"

namespace furlong::app {

void add_corpus_options(CLI::App& command, CorpusOptions& options) {
  command.add_option("INPUT", options.inputs, "Text files, .jsonl files, or folders of them")->required();
  command.add_option("--only", options.only, "Take only files that match this glob (may be repeated)")
      ->allow_extra_args(false);
  command.add_option("--exclude", options.exclude, "Leave out files that match this glob (may be repeated)")
      ->allow_extra_args(false);
  command.add_option("--split-on", options.split_on, "A line of just this text ends a document of a text file");
  command.add_option("--field", options.field, "Field of a .jsonl line that holds the text")->capture_default_str();
  command.add_flag("--skip-bad", options.skip_bad, "Count bad .jsonl lines instead of refusing the file");
  command.add_flag("--binary", options.binary, "Accept files with NUL bytes");
}

}  // namespace furlong::app
