"""K3's chat format for the small K3; this file is copied into the model folder.

It imports only what `trust_remote_code` can count on (transformers, tokenizers, the standard
library). SGLang takes the `kimi_k3` chat path for every `KimiK3*` architecture
(`chat_encoding.resolve_chat_encoding_spec`) and calls `apply_chat_template` here, as it does on the
official checkpoint, whose format has no Jinja template either.

An element opens with `<|open|>` tag ` key="value"` `<|sep|>` and closes with `<|close|>` tag
`<|sep|>`; every message ends with `<|end_of_msg|>`. Each segment is encoded on its own, and text
segments never match control tokens, so a marker typed by a user stays text. What decides prefix
reuse:

- tools, then the thinking effort, then the conversation, then one-shot options (`tool_choice`,
  `response_format`), then the generation prefix;
- in thinking mode every past assistant turn keeps its `think` channel, empty where the client sent
  no reasoning; outside thinking mode no past turn has one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")

Message = Mapping[str, Any]


class Segment(NamedTuple):
    """One piece of a prompt: a control token, or text in which nothing is a control token."""

    text: str
    control: bool = False


class SmallK3Tokenizer(PreTrainedTokenizerFast):
    """A word vocabulary behind K3's Python chat format."""

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> list[int] | str | BatchEncoding:
        """Render one conversation.

        Args:
            conversation: messages with `role` and `content`; assistant messages may carry
                `reasoning_content` (or `reasoning`) and `tool_calls`.
            tools: OpenAI tool schemas.
            add_generation_prompt: open the assistant's message and its first channel.
            tokenize: ids if true, the rendered text otherwise.
            return_dict: with `tokenize`, wrap the ids in a `BatchEncoding`.
            **options: `thinking` (or `enable_thinking`, default true), `thinking_effort`,
                `tool_choice`, `response_format`; others are ignored as K3's own encoder does.

        Raises:
            ValueError: an unknown role or thinking effort.
        """
        segments = list(render(conversation, tools, add_generation_prompt, options))
        if not tokenize:
            return "".join(segment.text for segment in segments)
        ids = self.encode_segments(segments)
        if not return_dict:
            return ids
        return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)})

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of the segments, each encoded on its own."""
        plain = self._plain()
        ids: list[int] = []
        for text, control in segments:
            if control:
                ids.append(self.convert_tokens_to_ids(text))
            else:
                ids.extend(plain.encode(text).ids)
        return ids

    def _plain(self) -> Tokenizer:
        """The vocabulary without its control tokens; made once."""
        plain: Tokenizer | None = self.__dict__.get("_plain_tokenizer")
        if plain is None:
            full = self.backend_tokenizer
            plain = Tokenizer(full.model)
            plain.pre_tokenizer = full.pre_tokenizer
            self.__dict__["_plain_tokenizer"] = plain
        return plain


def render(
    conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,  # noqa: FBT001 - the caller's own keyword
    options: Mapping[str, Any],
) -> Iterator[Segment]:
    """The prompt as segments, in K3's order (module docstring)."""
    thinking = options.get("thinking", options.get("enable_thinking", True)) is not False
    if tools:
        yield from _message("system", [Segment(_json(list(tools)))], type="tool-declare")
    if thinking:
        yield from _message("system", [Segment(_effort(options))], type="thinking-effort")
    for message in _tool_results_in_call_order(conversation):
        yield from _conversation_message(message, thinking=thinking)
    if options.get("tool_choice") is not None:
        yield from _message("system", [Segment(_json(options["tool_choice"]))], type="tool-choice")
    if options.get("response_format") is not None:
        body = [Segment(_json(options["response_format"]))]
        yield from _message("system", body, type="response-format")
    if add_generation_prompt:
        yield from _open("message", role="assistant")
        yield from _open("think" if thinking else "response")


def _conversation_message(message: Message, *, thinking: bool) -> Iterator[Segment]:
    role = message["role"]
    if role == "assistant":
        yield from _message("assistant", _assistant_channels(message, thinking=thinking))
    elif role == "tool":
        body = [Segment(_text(message))]
        yield from _message("tool", body, tool=message["name"], index=message["index"])
    elif role in ("system", "user"):
        if message.get("tools"):
            declared = [Segment(_json(list(message["tools"])))]
            yield from _message("system", declared, type="tool-declare")
        else:
            yield from _message(role, [Segment(_text(message))])
    else:
        raise ValueError(f"unknown role {role!r}: use system, user, assistant or tool")


def _assistant_channels(message: Message, *, thinking: bool) -> Iterator[Segment]:
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        yield from _element("think", [Segment(reasoning)])
    yield from _element("response", [Segment(_text(message))])
    calls = message.get("tool_calls") or []
    if calls:
        yield from _open("tools")
        for index, call in enumerate(calls, start=1):
            arguments = _call_arguments(call["function"])
            yield from _element("call", arguments, tool=call["function"]["name"], index=index)
        yield from _close("tools")


def _call_arguments(function: Mapping[str, Any]) -> Iterator[Segment]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    for key, value in arguments.items():
        kind, text = ("string", value) if isinstance(value, str) else _typed(value)
        yield from _element("argument", [Segment(text)], key=key, type=kind)


def _typed(value: object) -> tuple[str, str]:
    names = {bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null"), json.dumps(value, ensure_ascii=False)


def _tool_results_in_call_order(conversation: Sequence[Message]) -> Iterator[Message]:
    """The messages, each run of tool results sorted by the calls it answers and indexed from 1."""
    calls: dict[str, tuple[int, str]] = {}
    results: list[Message] = []
    for message in [*conversation, {"role": None}]:
        if message["role"] == "tool":
            unknown = (len(results) + 1, message.get("name") or "")
            index, name = calls.get(message.get("tool_call_id") or "", unknown)
            results.append({**message, "name": name, "index": index})
            continue
        yield from sorted(results, key=lambda result: result["index"])
        results = []
        if message["role"] is None:
            return
        if message["role"] == "assistant":
            calls = {
                call.get("id", ""): (index, call["function"]["name"])
                for index, call in enumerate(message.get("tool_calls") or [], start=1)
            }
        yield message


def _message(role: str, body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    yield from _element("message", body, role=role, **attributes)
    yield Segment(END_OF_MSG, control=True)


def _element(tag: str, body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    yield from _open(tag, **attributes)
    yield from body
    yield from _close(tag)


def _open(tag: str, **attributes: object) -> Iterator[Segment]:
    yield Segment(OPEN, control=True)
    yield Segment(tag)
    for key, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        yield Segment(f' {key}="{escaped}"')
    yield Segment(SEP, control=True)


def _close(tag: str) -> Iterator[Segment]:
    yield Segment(CLOSE, control=True)
    yield Segment(tag)
    yield Segment(SEP, control=True)


def _effort(options: Mapping[str, Any]) -> str:
    effort = options.get("thinking_effort") or "max"
    if effort not in EFFORTS:
        raise ValueError(f"thinking_effort is {effort!r}: use one of {', '.join(EFFORTS)}")
    return f"thinking effort {effort}"


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
