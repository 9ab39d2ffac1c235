"""Metrics of requests and responses by model, target model, fairness id and priority."""

from __future__ import annotations

from epp.telemetry import buckets
from epp.telemetry.families import OTHER, Counter, Group, Histogram, Names, counter, gauge, histogram

LABELS = ("model_name", "target_model_name", "fairness_id", "priority")


class RequestFamilies(Group):
    """The families; `resolve` gives the children of one label combination."""

    def __init__(self, limit: int = 2000) -> None:
        self.limit = limit
        self.models = Names()
        self.fairness_ids = Names()
        self._resolved: dict[tuple[str, ...], RequestMetrics] = {}
        self._known: dict[tuple[str, str, str, int], RequestMetrics] = {}
        """By values that are labels as they stand: as many as there are label sets."""
        name = "llm_d_epp_{}".format
        self.total = counter(name("request_total"), "Requests with a readable model name.", LABELS)
        self.errors = counter(
            name("request_error_total"), "Requests that ended in an error, by its code.", (*LABELS, "error_code")
        )
        self.running = gauge(name("request_running"), "Requests between arrival and end.", LABELS)
        self.duration = histogram(
            name("request_duration_seconds"), "From arrival to end of the response.", buckets.LATENCY, LABELS
        )
        self.request_size = histogram(
            name("request_size_bytes"), "Size of request bodies.", buckets.REQUEST_BYTES, LABELS
        )
        self.response_size = histogram(
            name("response_size_bytes"),
            "Size of response bodies, as far as they are seen.",
            buckets.RESPONSE_BYTES,
            LABELS,
        )
        self.input_tokens = histogram(
            name("request_input_tokens"), "Prompt tokens as the engine counted them.", buckets.TOKENS, LABELS
        )
        self.cached_tokens = histogram(
            name("request_cached_tokens"), "Prompt tokens the engine found cached.", buckets.TOKENS, LABELS
        )
        self.output_tokens = histogram(
            name("request_output_tokens"), "Tokens the engine generated.", buckets.OUTPUT_TOKENS, LABELS
        )
        self.per_output_token = histogram(
            name("request_ntpot_seconds"), "Duration over output tokens.", buckets.NORMALIZED_TIME_PER_TOKEN, LABELS
        )
        self.ttft = histogram(
            name("request_ttft_seconds"),
            "From arrival to the first byte of the response.",
            buckets.TIME_TO_FIRST_TOKEN,
            (*LABELS, "streaming"),
        )
        self.tpot = histogram(
            name("request_streaming_tpot_seconds"),
            "Time per output token after the first, streamed responses.",
            buckets.TIME_PER_TOKEN,
            LABELS,
        )
        self.itl = histogram(
            name("request_streaming_itl_seconds"), "Gap between streamed chunks.", buckets.INTER_TOKEN, LABELS
        )

    def __len__(self) -> int:
        return len(self._resolved)

    def resolve(self, model: str, target: str, fairness: str, priority: int) -> RequestMetrics:
        given = (model, target, fairness, priority)
        known = self._known.get(given)
        if known is not None:
            return known
        values: tuple[str, ...] = (
            self.models.bound(model),
            self.models.bound(target),
            self.fairness_ids.bound(fairness),
            str(priority),
        )
        found = self._resolved.get(values)
        if found is None:
            if len(self._resolved) >= self.limit:
                values = (OTHER,) * len(LABELS)
            found = self._resolved.setdefault(values, RequestMetrics(self, values))
        if values == (model, target, fairness, str(priority)):
            self._known[given] = found
        return found


class RequestMetrics:
    """The children of one label combination. A request calls `started` once and `finished` once."""

    def __init__(self, families: RequestFamilies, values: tuple[str, ...]) -> None:
        self._values = values
        self._errors = families.errors
        self._total = families.total.child(*values)
        self._running = families.running.child(*values) if values[0] else Counter()
        self._duration = families.duration.child(*values)
        self._request_size = families.request_size.child(*values)
        self._response_size = families.response_size.child(*values)
        self._input_tokens = families.input_tokens.child(*values)
        self._cached_tokens = families.cached_tokens.child(*values)
        self._output_tokens = families.output_tokens.child(*values)
        self._per_output_token = families.per_output_token.child(*values)
        self._tpot = families.tpot.child(*values)
        self._itl = families.itl.child(*values)
        self._ttft: tuple[Histogram, Histogram] = (
            families.ttft.child(*values, "false"),
            families.ttft.child(*values, "true"),
        )

    def started(self, body_bytes: int) -> None:
        self._total.value += 1
        self._running.value += 1
        self._request_size.observe(body_bytes)

    def finished(
        self,
        duration: float,
        *,
        error: str = "",
        ttft: float = 0.0,
        streaming: bool = False,
        response_bytes: int = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        """Seconds, bytes and tokens; 0 = not known, except cached tokens, where None is. `error` is an error code's
        name, "" for success."""
        self._running.value -= 1
        self._duration.observe(duration)
        if error:
            self._errors.child(*self._values, error).inc()
        if response_bytes:
            self._response_size.observe(response_bytes)
        if ttft:
            self._ttft[streaming].observe(ttft)
        if input_tokens:
            self._input_tokens.observe(input_tokens)
        if cached_tokens is not None:
            self._cached_tokens.observe(cached_tokens)
        if output_tokens:
            self._generated(output_tokens, duration, ttft if streaming else 0.0)

    def _generated(self, tokens: int, duration: float, ttft: float) -> None:
        self._output_tokens.observe(tokens)
        self._per_output_token.observe(duration / tokens)
        if ttft and tokens > 1:
            self._tpot.observe((duration - ttft) / (tokens - 1))

    def chunk_gap(self, seconds: float) -> None:
        """Time between two chunks of a streamed response."""
        self._itl.count(seconds)
