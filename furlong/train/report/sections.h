#pragma once

// The sections of the page, and what they share. A section without input says so through Page::left_out.

#include <functional>
#include <string>
#include <vector>

#include "furlong/train/report/line_chart.h"
#include "furlong/train/report/page.h"
#include "furlong/train/report/run_record.h"

namespace furlong::report {

void add_header(Page& page, const RunRecord& run);
void add_loss(Page& page, const RunRecord& run);
void add_compression(Page& page, const RunRecord& run);
void add_experts(Page& page, const RunRecord& run);
void add_gradient_norm(Page& page, const RunRecord& run);
void add_speed(Page& page, const RunRecord& run);
void add_decays(Page& page, const RunRecord& run);
void add_depth_weights(Page& page, const RunRecord& run);
void add_state_bytes(Page& page, const RunRecord& run);
void add_samples(Page& page, const RunRecord& run);

/// A maximal stretch of steps in one stage: steps[first] .. steps[last].
struct StageSpan {
  std::string name;
  int64_t context = 0;
  size_t first = 0, last = 0;
};
std::vector<StageSpan> stage_spans(const RunRecord& run);
std::vector<Band> stage_bands(const RunRecord& run);

Axis token_axis();
/// One value of each step over the tokens trained.
Series step_series(const RunRecord& run, const std::string& name, const std::string& color,
                   const std::function<double(const StepRecord&)>& value);
/// Mean over about `window` finite values: exponential, once forwards and once backwards, so that it does not lag.
Series smooth(const Series& series, double window);
double median(std::vector<double> values);  // of the finite ones; NaN if there is none

/// Steps for which `has` holds, gathered into at most `limit` groups of neighbours: the columns of a heat map.
struct ColumnGroups {
  std::vector<std::vector<const StepRecord*>> groups;
  std::vector<double> edges;  // tokens; groups + 1
};
ColumnGroups group_columns(const RunRecord& run, size_t limit, const std::function<bool(const StepRecord&)>& has);

}  // namespace furlong::report
