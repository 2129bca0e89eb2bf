#include "furlong/train/op_profile.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <memory>

#include "furlong/base/clock.h"

namespace furlong {

namespace {

struct Frame : at::ObserverContext {
  Stopwatch watch;
  double inner_seconds = 0.0;
  Frame* parent = nullptr;
};

struct Totals {
  std::map<std::string, OpTime> by_name;
  Frame* top = nullptr;
};

thread_local Totals totals;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction&) {
  auto frame = std::make_unique<Frame>();
  frame->parent = totals.top;
  totals.top = frame.get();
  return frame;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* frame = static_cast<Frame*>(context);
  const double seconds = frame->watch.seconds();
  totals.top = frame->parent;
  if (frame->parent != nullptr) frame->parent->inner_seconds += seconds;
  OpTime& time = totals.by_name[function.name()];
  ++time.calls;
  time.seconds += seconds - frame->inner_seconds;
}

}  // namespace

OpProfile::OpProfile() {
  totals = {};
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end));
}

OpProfile::~OpProfile() {
  at::removeCallback(handle_);
}

std::vector<OpTime> OpProfile::times() const {
  std::vector<OpTime> list;
  for (const auto& [name, time] : totals.by_name) {
    list.push_back(time);
    list.back().name = name;
  }
  std::sort(list.begin(), list.end(), [](const OpTime& a, const OpTime& b) { return a.seconds > b.seconds; });
  return list;
}

}  // namespace furlong
