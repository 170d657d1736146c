"""One conversation, turn by turn: each answer is given on the history of the new answers, not of the old ones."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from specfleet.data.conversation import Conversation, Message, RowRejected
from specfleet.data.regenerate.engines import Answer, AnswerEngine


@dataclass
class Transcript:
    """Token ids of all turns as one sequence, as long as each prompt continues exactly what was there before.

    It ends to be one when a template changes the history (drops reasoning) or the engine gives no ids.
    """

    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    whole: bool = True

    def add(self, answer: Answer) -> None:
        if not self.whole or not answer.prompt_ids or not answer.ids:
            self.whole = False
            return
        seen = self.prompt + self.response
        if answer.prompt_ids[: len(seen)] != seen:
            self.whole = False
            return
        between = answer.prompt_ids[len(seen) :]
        if not self.prompt:
            self.prompt, between = between, []
        self.response += between + answer.ids
        self.mask += [0] * len(between) + [1] * len(answer.ids)

    def columns(self) -> dict[str, list[int]]:
        """Fields of a conversation file; the mask only where there is something between answers."""
        if not self.whole:
            return {}
        columns = {"prompt_token_ids": self.prompt, "response_token_ids": self.response}
        return columns if all(self.mask) else columns | {"response_loss_mask": self.mask}


def questions(conversation: Conversation) -> list[list[Message]]:
    """What stands before each answer to be written: user messages, the system's with the first of them.

    Raises RowRejected: tools_unsupported (the tools' replies belong to the old calls), no_question.
    """
    if conversation.tools or any(message["role"] == "tool" for message in conversation.messages):
        raise RowRejected("tools_unsupported", "tool replies cannot be regenerated")
    groups: list[list[Message]] = []
    group: list[Message] = []
    for message in conversation.messages:
        if message["role"] != "assistant":
            group.append(message)
        elif any(item["role"] == "user" for item in group):
            groups.append(group)
            group = []
    if any(item["role"] == "user" for item in group):
        groups.append(group)
    if not groups:
        raise RowRejected("no_question", f"{len(conversation.messages)} messages, none of them a user's")
    return groups


def content_hash(groups: list[list[Message]]) -> str:
    """sha256 (hex) of everything the target is asked. The old answers do not count: they are replaced."""
    return hashlib.sha256(json.dumps(groups, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Answered:
    """messages: questions and new answers. finish of the last one; after a cut answer no further turn is asked."""

    messages: list[Message]
    finish: str
    ids: dict[str, list[int]]
    tokens: int


async def answer_turns(groups: list[list[Message]], engine: AnswerEngine) -> Answered:
    """Raises RowRejected (also empty_answer), HostError."""
    messages: list[Message] = []
    transcript, tokens, finish = Transcript(), 0, ""
    for group in groups:
        messages += group
        answer = await engine.answer(messages)
        if not answer.text.strip():
            raise RowRejected("empty_answer", f"turn {len(messages)}, finish {answer.finish}")
        message: Message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        messages.append(message)
        transcript.add(answer)
        tokens, finish = tokens + answer.tokens, answer.finish
        if finish != "stop":
            break
    return Answered(messages, finish, transcript.columns(), tokens)


def output_row(conversation: Conversation, answered: Answered, note: dict[str, Any]) -> dict[str, Any]:
    """A row that `specctl data prepare` reads. Source, split and licence are the input's."""
    return {
        "id": conversation.id,
        "source": conversation.source,
        "split": conversation.split,
        "license": conversation.license,
        "messages": answered.messages,
        "finish": answered.finish,
        **answered.ids,
        "regenerated": note,
    }
