#pragma once

// The fixed bodies of the K3 prompt, byte for byte: the model was trained with them, so they are part of its interface
// like its token ids. Origin: models/templates/Kimi-K3.jinja of ggml-org/llama.cpp and kimi_k3/encoding.py of
// NVIDIA-NeMo/Automodel, which agree. chat_template_test checks length and SHA-256 of each. Nothing else belongs here.

#include <string_view>

namespace furlong::interface_strings {

/// Followed by the effort's name and kThinkingEffortEnd.
constexpr std::string_view kThinkingEffort =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=";
constexpr std::string_view kThinkingEffortEnd = "`.";

/// Followed by the tools as JSON and kFenceEnd.
constexpr std::string_view kToolDeclare =
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
/// The same for tools that a later system message brings.
constexpr std::string_view kDynamicToolDeclare =
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n";

constexpr std::string_view kToolChoiceRequired =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
constexpr std::string_view kToolChoiceNone =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";

constexpr std::string_view kJsonObject =
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";
/// Followed by the schema as JSON and kFenceEnd.
constexpr std::string_view kJsonSchema =
    "The system is invoked with `response_format=json_schema`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
    "The JSON data must match the following schema:\n```json\n";

constexpr std::string_view kFenceEnd = "\n```";

/// Stands for one image until its media sequence is known. No token: it is encoded as text.
constexpr std::string_view kImagePlaceholder = "<|kimi_image_placeholder|>";

}  // namespace furlong::interface_strings
