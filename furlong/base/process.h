#pragma once

#include <cstdint>

namespace furlong {

/// Resident memory of this process now, and the most it ever was, in bytes.
int64_t rss_bytes();
int64_t peak_rss_bytes();
/// The memory that this machine has.
int64_t machine_memory_bytes();

}  // namespace furlong
