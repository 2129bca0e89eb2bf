#pragma once

// The options that choose a corpus, shared by `furlong tokenizer train` and `furlong data prepare`.

#include <CLI/CLI.hpp>

#include "furlong/data/corpus.h"

namespace furlong::app {

void add_corpus_options(CLI::App& command, CorpusOptions& options);

}  // namespace furlong::app
