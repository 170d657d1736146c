"""Prometheus metrics of a capture worker and of its reaper."""

from prometheus_client import Counter, Gauge, Histogram

CAPTURED_TOKENS = Counter("specfleet_capture_tokens", "Tokens whose features were stored and announced.")
CAPTURED_SAMPLES = Counter("specfleet_capture_samples", "Samples whose references were announced.")
FAILED_SAMPLES = Counter("specfleet_capture_failures", "Attempts given back, by failure class.", ["failure_class"])
REFUSED_CLAIMS = Counter("specfleet_capture_refused_claims", "Claims refused (stale or repeated messages).")
STORE_FULL = Counter("specfleet_capture_store_full", "Puts that met a full pool and waited.")
BATCH_SECONDS = Histogram(
    "specfleet_capture_batch_seconds", "One forward pass.", buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
)
PUT_SECONDS = Histogram(
    "specfleet_capture_put_seconds", "One sample's put.", buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
)
REQUEST_SECONDS = Histogram(
    "specfleet_capture_request_seconds",
    "One prompt at a server, from the request until its features are stored.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
REQUEST_TOKENS = Gauge("specfleet_capture_request_tokens", "Tokens under way at servers.")
WINDOW_TOKENS = Gauge("specfleet_capture_window_tokens", "Tokens that may be under way at servers; adapts.")
SINK_SECONDS = Counter("specfleet_capture_sink_seconds", "Time servers spent on features, by part.", ["part"])
ENGINE_LOSSES = Counter("specfleet_capture_engine_losses", "Times an engine had to be loaded anew.")
PADDING = Gauge("specfleet_capture_padding_share", "Share of the newest batch that was padding, 0..1.")
IN_HAND = Gauge("specfleet_capture_in_hand", "Prompts fetched and not yet announced or given back.")
RELEASED_OBJECTS = Counter("specfleet_capture_released_objects", "Objects deleted by the reaper.")
RELEASE_RETRIES = Counter("specfleet_capture_release_retries", "Releases put back: an object could not be deleted.")


def total(counter: Counter) -> float:
    """The counter's value now, through the public collection interface."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return next(sample.value for sample in samples if sample.name.endswith("_total"))
