"""Conversation files → the same conversations with the target's own answers, many at a time, in the order of the input."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfleet.contracts.errors import DataError
from specfleet.data.conversation import Conversation, RowRejected
from specfleet.data.regenerate.engines import Answer, AnswerEngine, Sampling
from specfleet.data.regenerate.output import OutputFile
from specfleet.data.regenerate.turns import Answered, answer_turns, content_hash, output_row, questions
from specfleet.data.sources import Reading, iter_conversations, resolve_sources

# Rows are written in the order of the input, so quick ones wait for a slow one before them: this many per request in flight.
_AHEAD = 4


@dataclass(frozen=True)
class Regenerated:
    """rows_read = rows + sum(rejects) when nothing else was in the output before."""

    out: str
    model: str
    rows_read: int
    rows: int
    new_rows: int
    rows_with_token_ids: int
    new_tokens: int
    finish: dict[str, int]
    rejects: dict[str, int]
    reject_examples: dict[str, str]


class _Bounded:
    """An engine with so many requests in flight."""

    def __init__(self, engine: AnswerEngine, concurrency: int) -> None:
        self._engine, self._slots = engine, asyncio.Semaphore(concurrency)

    @property
    def model(self) -> str:
        return self._engine.model

    async def answer(self, messages: list[Any]) -> Answer:
        async with self._slots:
            return await self._engine.answer(messages)


async def regenerate(
    sources: Sequence[str | Path],
    engine: AnswerEngine,
    sampling: Sampling,
    out: Path,
    *,
    concurrency: int = 32,
    max_samples: int = 0,
    keep: dict[str, list[str]] | None = None,
    on_row: Callable[[int, int], None] = lambda rows, tokens: None,
) -> Regenerated:
    """Rows that `out` already holds are not asked again, so the same call resumes. max_samples: input rows, 0: all.

    on_row(new rows, new tokens) after each. Raises DataError SF-DATA-*, SF-REGEN-NO-ROWS, what OutputFile raises, HostError.
    """
    settings = {"model": engine.model, **sampling.to_dict()}
    reading, rows, tokens = Reading(), 0, 0
    conversations = iter_conversations(resolve_sources(sources), reading, keep or {}, to_answer=True)
    bounded = _Bounded(engine, concurrency)
    with OutputFile(out, settings) as output:
        asked = _asked(itertools.islice(conversations, max_samples or None), output.done, reading)
        async with aclosing(_in_order(asked, bounded, concurrency * _AHEAD)) as answers:
            async for conversation, key, answered in answers:
                if isinstance(answered, RowRejected):
                    reading.rejects.add(conversation.where, answered)
                    continue
                output.append(output_row(conversation, answered, {"content": key, **settings}))
                rows, tokens = rows + 1, tokens + answered.tokens
                on_row(rows, tokens)
        if not output.done:
            raise DataError(
                "SF-REGEN-NO-ROWS", f"none of {reading.rows_read} rows was answered: {reading.rejects.describe()}"
            )
        return Regenerated(
            out=str(out),
            model=engine.model,
            rows_read=reading.rows_read,
            rows=len(output.done),
            new_rows=rows,
            rows_with_token_ids=output.with_ids,
            new_tokens=tokens,
            finish=dict(output.finish.most_common()),
            rejects=dict(reading.rejects.counts.most_common()),
            reject_examples=dict(reading.rejects.examples),
        )


_Asked = tuple[Conversation, str, list[list[Any]]]


def _asked(conversations: Iterator[Conversation], done: set[str], reading: Reading) -> Iterator[_Asked]:
    """Conversations still to be answered, each content once."""
    seen: set[str] = set()
    for conversation in conversations:
        try:
            groups = questions(conversation)
            key = content_hash(groups)
            if key in seen:
                raise RowRejected("duplicate", "asks what an earlier row asks")
        except RowRejected as rejected:
            reading.rejects.add(conversation.where, rejected)
            continue
        seen.add(key)
        if key not in done:
            yield conversation, key, groups


async def _in_order(
    asked: Iterator[_Asked], engine: AnswerEngine, window: int
) -> AsyncGenerator[tuple[Conversation, str, Answered | RowRejected], None]:
    """(conversation, key, Answered | RowRejected) in the order of the input, `window` of them at work or waiting."""
    pending: deque[tuple[_Asked, asyncio.Task[Answered | RowRejected]]] = deque()

    async def work(groups: list[list[Any]]) -> Answered | RowRejected:
        try:
            return await answer_turns(groups, engine)
        except RowRejected as rejected:
            return rejected

    try:
        while True:
            for item in itertools.islice(asked, window - len(pending)):
                pending.append((item, asyncio.create_task(work(item[2]))))
            if not pending:
                return
            (conversation, key, _), task = pending[0]
            answered = await task
            pending.popleft()
            yield conversation, key, answered
    finally:
        for _, task in pending:
            task.cancel()
        await asyncio.gather(*(task for _, task in pending), return_exceptions=True)
