"""One log format for every service: JSON lines on stderr, readable lines on a terminal.

Libraries that use the standard logging module (grpc, nats, transformers) come out in the same format.
"""

import logging
import os
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVEL_VARIABLE = "SPECFLEET_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Libraries whose INFO lines say nothing to an operator; they follow the level only when it is debug.
_CHATTY = ("asyncio", "grpc", "nats", "urllib3", "filelock")


def configure(service: str) -> None:
    """Sets up logging for this process; may be called again, the last call wins.

    Every line carries time, level, service, pid and whatever structlog.contextvars holds (run, task, sample, step).
    The level comes from SPECFLEET_LOG_LEVEL (debug, info, warning, error; default info).
    """
    # gRPC's C core writes its own lines to stderr; what matters of them arrives as errors of calls.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    name = os.environ.get(LEVEL_VARIABLE, "info").strip().lower()
    level = _LEVELS.get(name, logging.INFO)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _identity(service),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    terminal = sys.stderr.isatty()
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str, ensure_ascii=False)]
    )
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        # Loggers are made at import; caching them would freeze the set-up of whoever logged first.
        cache_logger_on_first_use=False,
    )
    _configure_standard_logging(shared, render, level)
    if name not in _LEVELS:
        known = ", ".join(_LEVELS)
        structlog.get_logger().warning(
            "log level is unknown; using info", variable=LEVEL_VARIABLE, value=name, known=known
        )


def _configure_standard_logging(shared: list[Processor], render: list[Processor], level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        # pytest's capture handlers and the like stay; only what an earlier configure() added goes.
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))


def _identity(service: str) -> Processor:
    pid = os.getpid()

    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        event.setdefault("pid", pid)
        return event

    return add


def bind(**keys: Any) -> None:
    """Adds keys (run=…, step=…) to every following line of this task or thread."""
    structlog.contextvars.bind_contextvars(**keys)
