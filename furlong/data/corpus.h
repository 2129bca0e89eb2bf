#pragma once

// Finds the documents in folders and files of text. A text file is one document, or several between separator lines; a
// .jsonl file holds one document a line.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace furlong {

struct CorpusOptions {
  std::vector<std::filesystem::path> inputs;  // folders (searched deep, hidden entries left out) and files
  std::vector<std::string> only;              // keep files that match one of these; * matches / as well
  std::vector<std::string> exclude;           // drop files that match one of these
  std::optional<std::string> split_on;        // a line of just this text ends a document
  std::string field = "text";                 // of a .jsonl line
  bool skip_bad = false;                      // count bad .jsonl lines instead of refusing the file
  bool binary = false;                        // accept files with NUL bytes
};

struct CorpusCounts {
  int64_t files = 0;
  int64_t documents = 0;  // handed on
  int64_t empty = 0;      // dropped: no text in them
  int64_t bad_lines = 0;  // dropped under skip_bad
};

/// The files that the options select, sorted by path within each input. UsageError when an input has none or does not
/// exist.
std::vector<std::filesystem::path> corpus_files(const CorpusOptions& options);

/// Calls `document` with each text, in order; it is valid during the call. Errors name file and line: UsageError for
/// binary files, FormatError for bad lines, IoError for what cannot be read. UsageError when there is no document.
CorpusCounts read_corpus(const CorpusOptions& options, const std::function<void(std::string_view text)>& document);

}  // namespace furlong
