"""Request counts and durations of the server, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
OTHER = "other"  # the path label of requests to unknown paths


class Histogram:
    """A cumulative histogram: how many values are at most each bound, and the sum of all values."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, label: str = "") -> Iterator[str]:
        """Yield the samples in text form.

        Args:
            name: The name of the metric.
            label: A label such as ``path="/predict"``.
        """
        totals = list(accumulate(self._counts))
        for bound, total in zip((*self._bounds, "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{{label}{"," if label else ""}le="{bound}"}} {total}'
        braces = f"{{{label}}}" if label else ""
        yield f"{name}_sum{braces} {self._sum}"
        yield f"{name}_count{braces} {totals[-1]}"


class RequestMetrics:
    """Counts requests by path and status, and measures their duration.

    Unknown paths share one label, so clients cannot create new time series.
    """

    def __init__(self, paths: Collection[str] = ()):
        self.paths = paths
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, Histogram] = {}

    def add(self, path: str, status: str, seconds: float) -> None:
        path = path if path in self.paths else OTHER
        self._requests[path, status] += 1
        self._seconds.setdefault(path, Histogram(SECONDS)).add(seconds)

    def text(self, gauges: Mapping[str, float], batch_sizes: Histogram) -> str:
        """Return all metrics in Prometheus' text format.

        Args:
            gauges: Additional values by name. A name that ends in ``_total`` is a counter.
            batch_sizes: The sizes of batches.
        """
        lines = ["# TYPE kge_requests_total counter"]
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'kge_requests_total{{path="{path}",status="{status}"}} {count}')
        lines.append("# TYPE kge_request_seconds histogram")
        for path, seconds in sorted(self._seconds.items()):
            lines += seconds.lines("kge_request_seconds", f'path="{path}"')
        lines.append("# TYPE kge_batch_size histogram")
        lines += batch_sizes.lines("kge_batch_size")
        for name, value in gauges.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
