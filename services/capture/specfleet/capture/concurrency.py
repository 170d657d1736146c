"""How many tokens to have under way at servers that batch by themselves. A pure state machine; no I/O."""

# What counts as faster: measurements of single windows differ by a few percent.
GAIN = 1.05
# A measurement covers this many windows' worth of tokens, so that start-up and tail do not decide.
WINDOWS = 4


class Concurrency:
    """Doubles the window while that raises the rate of finished tokens; then holds the smallest window that was as fast.

    More under way than a server can batch only waits there: for the same rate every prompt takes longer, and more is lost
    with a server that dies.
    """

    def __init__(self, start_tokens: int, most_tokens: int) -> None:
        """most_tokens: what the servers can hold; the window never exceeds it."""
        self.limit_tokens = min(start_tokens, most_tokens)
        self.tokens = 0
        """Under way now."""
        self._most_tokens = most_tokens
        self._best_rate = 0.0
        self._holds = False
        self._since: float | None = None
        self._done = 0
        self._waits = False
        """The last prompt that asked was refused: the window decides the rate."""

    def admit(self, tokens: int, now: float) -> bool:
        """Whether a prompt of this size may start now; it counts as under way then. One always may when nothing else is."""
        self._waits = bool(self.tokens) and self.tokens + tokens > self.limit_tokens
        if not self._waits:
            self.tokens += tokens
            return True
        if self._since is None:
            # Only a full window says something about its size.
            self._since, self._done = now, 0
        elif not self._holds and self._done >= WINDOWS * self.limit_tokens and now > self._since:
            self._judge(self._done / (now - self._since))
            self._since = None
        return False

    def finish(self, tokens: int) -> None:
        """A prompt is no longer under way, however it ended."""
        self.tokens -= tokens
        self._done += tokens
        if self.tokens == 0 and not self._waits:
            self._since = None  # the window ran empty for want of prompts

    def _judge(self, rate: float) -> None:
        """rate: tokens per second that this window gave."""
        if rate < GAIN * self._best_rate:
            self.limit_tokens //= 2
            self._holds = True
        elif self.limit_tokens >= self._most_tokens:
            self._holds = True
        else:
            self._best_rate = rate
            self.limit_tokens = min(2 * self.limit_tokens, self._most_tokens)
