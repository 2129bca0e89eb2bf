#include "furlong/data/corpus.h"

#include <fnmatch.h>

#include <algorithm>

#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"

namespace furlong {

namespace fs = std::filesystem;

namespace {

bool matches_any(const std::vector<std::string>& globs, const fs::path& relative) {
  return std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) {
    return fnmatch(glob.c_str(), relative.c_str(), 0) == 0 ||
           fnmatch(glob.c_str(), relative.filename().c_str(), 0) == 0;
  });
}

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

/// All files below a folder, without hidden ones and hidden folders.
std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  try {
    for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::recursive_directory_iterator(); ++entry) {
      if (is_hidden(entry->path())) {
        entry.disable_recursion_pending();
      } else if (entry->is_regular_file()) {
        files.push_back(entry->path());
      }
    }
  } catch (const fs::filesystem_error& error) {
    throw IoError(error.path1().string() + ": cannot read the folder: " + error.code().message());
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Takes the first line off `rest`, without its line end.
std::string_view take_line(std::string_view& rest) {
  const size_t end = std::min(rest.find('\n'), rest.size());
  std::string_view line = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

/// Walks the files of a corpus and counts what it meets.
class Reader {
 public:
  Reader(const CorpusOptions& options, const std::function<void(std::string_view)>& document)
      : options_(options), document_(document) {}

  void read(const fs::path& path) {
    const MappedFile file(path);
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    ++counts_.files;
    if (!options_.binary && text.find('\0') != std::string_view::npos) {
      throw UsageError(path.string() + ": is binary (holds NUL bytes); leave it out with --exclude, or give --binary");
    }
    if (path.extension() == ".jsonl") {
      read_lines(path, text);
    } else if (options_.split_on) {
      read_parts(text);
    } else {
      emit(text);
    }
  }

  const CorpusCounts& counts() const { return counts_; }

 private:
  void emit(std::string_view text) {
    if (is_blank(text)) {
      ++counts_.empty;
      return;
    }
    ++counts_.documents;
    document_(text);
  }

  void read_parts(std::string_view text) {
    const char* begin = text.data();
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view line = take_line(rest);
      if (line != *options_.split_on) continue;
      emit(std::string_view(begin, line.data() - begin));
      begin = rest.data();
    }
    emit(std::string_view(begin, text.data() + text.size() - begin));
  }

  void read_lines(const fs::path& path, std::string_view text) {
    int64_t number = 0;
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view line = take_line(rest);
      ++number;
      if (is_blank(line)) continue;
      const Json value = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      const auto field = value.is_object() ? value.find(options_.field) : value.end();
      if (field != value.end() && field->is_string()) {
        emit(field->get_ref<const std::string&>());
      } else if (options_.skip_bad) {
        ++counts_.bad_lines;
      } else {
        const std::string why = value.is_discarded()   ? "is not JSON"
                                : !value.is_object()   ? "is not a JSON object"
                                : field == value.end() ? "has no field '" + options_.field + "'"
                                                       : "field '" + options_.field + "' is not a string";
        throw FormatError(path.string() + ":" + std::to_string(number) + ": " + why +
                          " (choose the field with --field, leave bad lines out with --skip-bad)");
      }
    }
  }

  const CorpusOptions& options_;
  const std::function<void(std::string_view)>& document_;
  CorpusCounts counts_;
};

}  // namespace

std::vector<fs::path> corpus_files(const CorpusOptions& options) {
  std::vector<fs::path> files;
  for (const fs::path& input : options.inputs) {
    if (!fs::exists(input)) throw IoError(input.string() + ": there is no such file or folder");
    const bool folder = fs::is_directory(input);
    const size_t before = files.size();
    for (const fs::path& file : folder ? files_below(input) : std::vector{input}) {
      const fs::path relative = folder ? file.lexically_relative(input) : file.filename();
      if (matches_any(options.exclude, relative)) continue;
      if (options.only.empty() || matches_any(options.only, relative)) files.push_back(file);
    }
    if (folder && files.size() == before) {
      const bool filtered = !options.only.empty() || !options.exclude.empty();
      throw UsageError(input.string() + ": holds no files" + (filtered ? " that --only and --exclude leave" : ""));
    }
  }
  return files;
}

CorpusCounts read_corpus(const CorpusOptions& options, const std::function<void(std::string_view)>& document) {
  Reader reader(options, document);
  for (const fs::path& file : corpus_files(options)) reader.read(file);
  const CorpusCounts& counts = reader.counts();
  if (counts.documents == 0) {
    std::string names;
    for (const fs::path& input : options.inputs) names += (names.empty() ? "" : ", ") + input.string();
    throw UsageError(names + ": no text found in " + std::to_string(counts.files) + " files");
  }
  return counts;
}

}  // namespace furlong
