#include "furlong/base/log.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <set>

namespace furlong {

void say(const std::string& line) {
  const std::string text = line + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
}

void say_once(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::scoped_lock lock(mutex);
  if (said.insert(line).second) say(line);
}

bool stderr_is_terminal() {
  return isatty(STDERR_FILENO) == 1;
}

}  // namespace furlong
