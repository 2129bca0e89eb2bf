#pragma once

// Conversations to prompts, for both families of published models. A prompt is a list of segments that are encoded one
// by one: only those of the program's own making may hold special tokens.

#include <string>
#include <vector>

#include "furlong/tokenizer/chat.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong {

/// How a model was taught to read conversations.
enum class ChatFormat {
  kXtml,   // Kimi K3: <|open|>message role="user"<|sep|>...<|close|>message<|sep|><|end_of_msg|>
  kTurns,  // the K2 family, Kimi-Linear-48B among them: <|im_user|>user<|im_middle|>...<|im_end|>
};

/// By the names in the token table. FormatError when it has the control tokens of neither format, or of both.
ChatFormat chat_format_of(const Tokenizer& tokenizer);

/// The segments of a conversation. What the model itself would say, up to the token that ends its turn, is `trained`.
/// UsageError names what cannot be rendered: images without their place, a tool result without a tool, an option that
/// the format does not have.
std::vector<TextSegment> render_chat(ChatFormat format, const ChatRequest& request);

/// The segments' text, end to end.
std::string prompt_text(const std::vector<TextSegment>& segments);

/// An attribute's value as it stands in an XTML tag: & and " escaped. `unescape_attribute` is its inverse.
std::string escape_attribute(const std::string& value);
std::string unescape_attribute(const std::string& value);

}  // namespace furlong
