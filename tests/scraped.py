"""What a server says at /metrics, read by the parser of the library that Prometheus's own tests use."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from http_calls import call
from serving import Served

Labels = frozenset[tuple[str, str]]


class Scrape:
    def __init__(self, served: Served) -> None:
        reply = call(served, "GET", "/metrics")
        assert reply.status == 200, reply.body
        self.samples: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(reply.body.decode()):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} comes twice"
                self.samples[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """0 for a series that is not there (yet)."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def labels(self, name: str, label: str) -> set[str]:
        """The values that the label has in the metric."""
        return {dict(labels)[label] for sample, labels in self.samples if sample == name}

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def change(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)
