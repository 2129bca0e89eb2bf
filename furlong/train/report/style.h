#pragma once

namespace furlong::report {

/// The style sheet of the page.
extern const char kStyle[];

}  // namespace furlong::report
