#pragma once

// A run as one self-contained HTML page.

#include <filesystem>
#include <string>

#include "furlong/train/report/run_record.h"

namespace furlong::report {

std::string render_report(const RunRecord& run);

}  // namespace furlong::report

namespace furlong {

/// Reads a run's folder and writes the page to `out`, atomically.
void write_report(const std::filesystem::path& run_folder, const std::filesystem::path& out);

}  // namespace furlong
