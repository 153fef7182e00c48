"""A run's metrics for Prometheus, over HTTP."""

import re
from collections.abc import Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, Histogram, Info, start_http_server

from gcore_runs.errors import UserError
from gcore_runs.trackers.base import Tracker

_STEP_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)


class PrometheusExporter(Tracker):
    """Serves ``http://HOST:PORT/metrics`` until it is closed.

    Every metric of metrics.jsonl is a gauge: ``critic/score/mean`` is ``gcore_critic_score_mean``, and its HELP text
    the metric's own name. There are also ``gcore_step``, ``gcore_info`` with the version of the distribution ``app``,
    and the histogram ``gcore_step_seconds``. Port 0 is any free one; `UserError` if it cannot be served there.
    """

    keeps_history = False

    def __init__(
        self, *, run: str, port: int, host: str = "127.0.0.1", app: str = "gcore-runs"
    ) -> None:
        self._registry = CollectorRegistry()
        info = Info("gcore", "The run, and its app's version.", registry=self._registry)
        info.info({"run": run, "version": version(app)})
        self._step = Gauge("gcore_step", "The last step that is done.", registry=self._registry)
        about = "Seconds of a step, since this process started."
        self._step_seconds = Histogram(
            "gcore_step_seconds", about, buckets=_STEP_BUCKETS_S, registry=self._registry
        )
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"trainer.prometheus is '{host}:{port}'; expected a free port of an address of this machine ({error})"
            ) from None

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._server.server_port

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve these values from now on; other metrics keep theirs."""
        for name, value in metrics.items():
            gauge = self._gauges[name] = self._gauges.get(name) or self._new_gauge(name)
            gauge.set(value)
        if "timing_s/step" in metrics:
            self._step_seconds.observe(metrics["timing_s/step"])
        self._step.set(step)

    def _new_gauge(self, metric: str) -> Gauge:
        name = "gcore_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        while True:
            try:
                return Gauge(name, metric, registry=self._registry)
            except (
                ValueError
            ):  # another metric has this name, such as one that differs in a slash alone
                name += "_"

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
