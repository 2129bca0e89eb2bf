#pragma once

// The two renderers behind chat_template.h.

#include <vector>

#include "furlong/tokenizer/chat.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong {

std::vector<TextSegment> render_xtml(const ChatRequest& request);
std::vector<TextSegment> render_turns(const ChatRequest& request);

/// All text of a message's content. UsageError when it holds an image.
std::string plain_text(const ChatMessage& message, const std::string& what);

}  // namespace furlong
