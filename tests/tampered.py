"""gemmwire-serve as a process in which something has been replaced, so that it can be caught in the act."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from process import environment
from serving import until

MAIN = """
import sys
def reached(phase):
    print("PHASE", phase, file=sys.stderr, flush=True)
{}
from gemmwire_service.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Tampered:
    """`said` is its standard error so far, `printed` its standard output."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    def wait_for(self, phase: str) -> None:
        """Until the code that was put in has called reached(phase)."""
        self._until(lambda: f"PHASE {phase}\n" in self.said, f"it never came to {phase}")

    @property
    def port(self) -> int:
        """Once it is ready."""
        self._until(lambda: self._ready() is not None, "it did not become ready")
        ready = self._ready()
        assert ready is not None
        return int(ready[1])

    @property
    def text(self) -> str:
        return "".join(self.said)

    def _ready(self) -> re.Match[str] | None:
        return re.search(r"ready on http://[^:]+:(\d+)", "".join(self.printed))

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        until(lambda: condition() or self.process.poll() is not None, failure, 60)
        assert condition(), f"{failure}; it ended with {self.process.poll()}: {self.text}"


@contextmanager
def tampered(code: str, *arguments: str, limit: Callable[[], None] | None = None) -> Iterator[Tampered]:
    """Run `code` and then the server on a free port; `limit` is called in the child before either."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN.format(code), "--port", "0", "--device", "cpu", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=limit,
    )
    found = Tampered(process)
    readers = [
        threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
        for lines, pipe in ((found.said, process.stderr), (found.printed, process.stdout))
    ]
    for reader in readers:
        reader.start()
    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for reader in readers:
            reader.join(10)
        for pipe in (process.stderr, process.stdout):
            assert pipe is not None
            pipe.close()
