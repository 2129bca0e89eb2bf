#include "furlong/eval/tasks/task.h"

#include "furlong/base/error.h"

namespace furlong::eval {

std::vector<std::string> tiny_task_names() {
  return {"mqar", "palin", "stack"};
}

std::unique_ptr<Task> make_tiny_task(const std::string& name) {
  if (name == "mqar") return make_mqar(64, 8, 128);
  if (name == "palin") return make_palindrome(63, 32);
  if (name == "stack") return make_stack(96, 4, 32);
  throw UsageError("unknown task '" + name + "' (known: mqar, palin, stack)");
}

}  // namespace furlong::eval
