"""Commands that stand in for the parts of ``up``: small Python programs."""

from __future__ import annotations

import sys

import attrs

from trio_sidecar.up.run import Commands

SLEEP = "import time; time.sleep(60)"
ENGINE = f"print('listening on 127.0.0.1:5', flush=True); {SLEEP}"
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
IGNORES_SIGTERM = f"{IGNORE_SIGTERM}; print('deaf', flush=True); {SLEEP}"
FRONTEND = """
import http.server, json, sys

ANSWER = {answer!r}

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(b'{{"data": [{{"id": "m"}}]}}')

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send(ANSWER.encode() if question["stream"] else b"{{}}")

http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()
"""
ANSWER = (
    'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    "data: [DONE]\n\n"
)


def python(program: str) -> tuple[str, ...]:
    """The command that runs a program in a bare interpreter, which starts fast."""
    return (sys.executable, "-I", "-S", "-c", program)


def commands(*, engine: str = ENGINE, worker: str = SLEEP, frontend: str = "", answer: str = ANSWER) -> Commands:
    """Stand-ins for the three parts; the front end answers every question with the same text."""
    return Commands(
        engine=python(engine),
        worker=python(worker),
        frontend=python(frontend or FRONTEND.format(answer=answer)),
    )


@attrs.frozen(slots=True)
class Lines:
    """Collects the lines of parts."""

    lines: list[tuple[str, str]] = attrs.field(factory=list)

    def __call__(self, part: str, line: str) -> None:
        """Take one."""
        self.lines.append((part, line))
